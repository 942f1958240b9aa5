"""A role that rewrites completions: sampled tokens are rewarded where its correction keeps them (P28)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.device.placement import fetch
from jrl.rollout.sources import Completions, LearnedScores, RewardSource
from jrl.tasks.data.corrections import Corrections, correction_prompt
from jrl.tasks.data.prompts import Visit
from jrl.tasks.rewards.correction import correction_rewards
from jrl.tasks.rewards.weighted import LARGEST_REWARD
from jrl.types import Array, Rollout, TrainState

KEPT = "corrector/kept"  # the share of a completion's sampled tokens that its correction keeps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corrector:
    """A role that an earlier stage trained on Corrections rewrites every completion, greedily."""

    role: str = "corrector"  # which one
    scale: float = 1.0  # reward of a sampled token that the correction keeps; of one that it does not, minus that

    def __post_init__(self) -> None:
        if not 0 < self.scale <= LARGEST_REWARD:
            raise ValueError(f"Corrector.scale = {self.scale} must be above 0 and finite, in float32 too; 1 is usual")


class _Dispatched(NamedTuple):
    batch: Completions
    rows: list[int]  # of the completions that are rewritten
    problems: list[str]  # [N], why a completion is not rewritten; "" if it is
    corrections: tuple[Array, Array]  # tokens and action mask of their rollout, a row for each of `rows`


def corrector_source(
    config: Corrector,
    written: Corrections,
    draw: Callable[[TrainState, Sequence[Visit]], Rollout],
    tokenizer: Any,
    longest: int,
) -> RewardSource:
    """Returns a source that rewards tokens by P28. It does not reward rows: its component KEPT has weight 0.

    A completion that does not fit in the prompt is not rewritten, and one whose correction is empty has no reward
    (MISSING): both rows are masked. A correction that reached the length limit counts as far as it goes.

    Args:
      written: the rows that the role was trained on; completions are inserted into the same prompt.
      draw: (state, visits) -> a greedy completion by the role for each visit, in order.
      longest: most tokens of such a prompt.
    """

    def submit(batch: Completions) -> _Dispatched:
        rows, problems, visits = [], [], []
        for row, text in enumerate(batch.texts):
            visit = batch.visits[row // batch.samples]
            prompt = tuple(tokenizer.encode_prompt(correction_prompt(written, visit.example.messages, text)))
            fits = len(prompt) <= longest
            problems.append("" if fits else f"it and its prompt have {len(prompt)} tokens, and {longest} are rewritten")
            if fits:
                rows.append(row)
                visits.append(visit._replace(prompt=prompt))
        rollout = draw(batch.state, visits)
        return _Dispatched(batch, rows, problems, (rollout.tokens, rollout.action_mask))

    def collect(ticket: _Dispatched) -> LearnedScores:
        batch, problems = ticket.batch, list(ticket.problems)
        host = batch.host
        tokens, written_by_role = fetch(ticket.corrections)
        reward = np.zeros((len(problems), host["tokens"].shape[1]), np.float32)
        kept = np.full((len(problems), 1), np.nan, np.float32)
        for i, row in enumerate(ticket.rows):
            start = len(batch.visits[row // batch.samples].prompt)
            columns = np.arange(start, max(start, host["length"][row]))
            correction = tokens[i][written_by_role[i]].tolist()
            text = host["tokens"][row, columns].tolist()
            rewards = correction_rewards(text, correction, scale=config.scale, end_ids=tokenizer.end_ids)
            if rewards is None:
                problems[row] = "its correction is empty"
                continue
            sampled = host["action_mask"][row, columns]
            if not sampled.any():
                problems[row] = "it has no sampled token"
                continue
            reward[row, columns] = np.where(sampled, rewards, 0)
            kept[row] = (reward[row, columns] > 0)[sampled].mean()
        return LearnedScores((KEPT,), (0.0,), kept, problems, token_reward=reward)

    return RewardSource(submit, collect, (KEPT,), rewards_tokens=True)
