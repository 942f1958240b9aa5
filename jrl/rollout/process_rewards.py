"""A role that scores the steps of completions: a step's score is the reward of the token that ends it (R15)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from jrl.device.placement import fetch
from jrl.rollout.sources import Completions, LearnedScores, RewardSource
from jrl.tasks.rewards.process import step_differences, step_values
from jrl.tasks.rewards.weighted import LARGEST_REWARD
from jrl.tasks.tokenizers.incremental import IncrementalDecoder
from jrl.types import Array, PackedBatch, TrainState

WORST_STEP = "process/worst_step"  # R15's outcome of a completion: the smallest score of its steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessRewards:
    """A role that an earlier stage trained by ProcessReward scores every step of a completion, p_k in [0, 1]."""

    role: str = "judge"  # which one
    weight: float = 1.0  # of the rewards of steps
    separator: str = "\n"  # what ends a step, as StepLabels.separator says
    # p_k - p_{k-1} on the token that ends step k, or p_k, which rewards having more steps
    form: Literal["differences", "values"] = "differences"
    prior: float = 0.5  # p_0 of differences: the score before the first step

    def __post_init__(self) -> None:
        if not 0 < abs(self.weight) <= LARGEST_REWARD:
            raise ValueError(f"ProcessRewards.weight = {self.weight} must not be 0, and must be finite, in float32 too")
        if not self.separator:
            raise ValueError("ProcessRewards.separator is empty; name what ends a step, such as '\\n'")
        if not 0 <= self.prior <= 1:
            raise ValueError(f"ProcessRewards.prior = {self.prior} must lie in [0, 1]; 0.5 is usual")


def step_ends(ids: Sequence[int], separator: str, pieces: Sequence[bytes], leads: bool) -> tuple[list[int], list[int]]:
    """Returns two indices per step, both increasing: of the token after which it is scored, and of the rewarded token.

    A step is scored after the token that completes its separator; a last step without a separator after the last token
    with text. A token that completes several separators ends one step, and blank text is no step. The rewarded token
    is the same, except for the last step: there it is the last token, such as a stop token, so that every token is
    followed by a reward or has one.

    Args:
      ids: the sampled tokens of a completion. pieces, leads: the tokenizer's (jrl.tasks.tokenizers.contract).
    """
    decoder, text, done, ends, last = IncrementalDecoder(pieces, leads), "", 0, [], None
    for index, token in enumerate(ids):
        more, before = decoder.feed([token]), len(text)
        text += more
        if more:
            last = index
        at = text.find(separator, max(done, before - len(separator) + 1))
        ends_step = False
        while at >= 0:
            ends_step |= bool(text[done:at].strip())
            done = at + len(separator)
            at = text.find(separator, done)
        if ends_step:
            ends.append(index)
    if last is not None and text[done:].strip() and last not in ends:
        ends.append(last)
    return ends, [*ends[:-1], len(ids) - 1] if ends else []


def process_source(
    config: ProcessRewards, scores: Callable[[TrainState, PackedBatch], Array], tokenizer: Any
) -> RewardSource:
    """Returns a source that rewards the token that ends a step by R15. It does not reward rows: its component
    WORST_STEP has weight 0.

    A completion without a step counts as one step, scored at its last sampled token. A row with a score that is not
    finite, or without a sampled token, has no reward (MISSING) and is masked.

    Args:
      scores: (state, packed) -> [M, R, L] on the device, the role's reward head at every token.
    """
    pieces = tokenizer.token_bytes()

    def submit(batch: Completions) -> tuple[Completions, list[tuple[Array, ...]]]:
        dispatched = [(p.sequence, p.segment, p.positions, scores(batch.state, p)) for p in batch.packed()]
        return batch, dispatched

    def collect(ticket: tuple[Completions, list[tuple[Array, ...]]]) -> LearnedScores:
        batch, dispatched = ticket
        count, host = len(batch.texts), batch.host
        by_token = np.full((count, host["tokens"].shape[1]), np.nan)
        for packed in fetch(dispatched):
            place_scores(by_token, *packed)
        reward = np.zeros(by_token.shape, np.float32)
        worst, problems = np.full((count, 1), np.nan, np.float32), [""] * count
        for row in range(count):
            columns = np.flatnonzero(host["action_mask"][row])
            if not len(columns):
                problems[row] = "it has no sampled token"
                continue
            ids = host["tokens"][row, columns].tolist()
            ends_of_steps = step_ends(ids, config.separator, pieces, tokenizer.leads)
            scored, ends = (columns[indices or [len(ids) - 1]] for indices in ends_of_steps)
            steps = 1 / (1 + np.exp(-np.clip(by_token[row, scored], -60, 60)))
            if not np.isfinite(steps).all():
                problems[row] = f"the scores of its steps are {steps.tolist()}"
                continue
            values = steps.tolist()
            rewards = step_values(values) if config.form == "values" else step_differences(values, config.prior)
            reward[row, ends], worst[row] = config.weight * np.array(rewards), min(values)
        return LearnedScores((WORST_STEP,), (0.0,), worst, problems, token_reward=reward)

    return RewardSource(submit, collect, (WORST_STEP,), rewards_tokens=True)


def place_scores(
    by_token: np.ndarray, sequence: np.ndarray, segment: np.ndarray, positions: np.ndarray, scores: np.ndarray
) -> None:
    """Writes scores of packed tokens into `by_token`, [N, T], in place, by sequence and position. Padding, and
    sequences from N on, are left out.

    Args:
      sequence: [M, R, S] int32. segment, positions: [M, R, L] int32. scores: [M, R, L] float.
    """
    inside = segment < sequence.shape[-1]
    rows = np.take_along_axis(sequence, np.where(inside, segment, 0), axis=-1)
    inside &= rows < len(by_token)
    by_token[rows[inside], positions[inside]] = scores[inside]
