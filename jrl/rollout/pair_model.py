"""A pair model: a role that reads two completions of a prompt and decides which one is better (R20, P17)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.algos.contract import PREFERENCE_OVER
from jrl.device.placement import fetch
from jrl.rollout.sources import Completions, LearnedScores, RewardSource
from jrl.tasks.data.comparisons import Comparisons, comparison_prompt
from jrl.tasks.rewards.pairwise import pairwise_scores
from jrl.tasks.rewards.weighted import LARGEST_REWARD
from jrl.types import Array, TrainState

WINS = "pair_model/wins"  # R20, the mean preference for a completion over the others of its prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairModel:
    """A role that compares every two completions of a prompt, in both orders: of G samples G (G - 1) questions, fewer
    where some are equal."""

    # Which one: that of an earlier stage that learned Comparisons, 'teacher' for the folder of Config.teacher, or
    # 'policy', which then judges itself.
    role: str = "pair_model"
    weight: float = 1.0  # in the reward, of R20's share of wins
    # How it is asked; None: as the last earlier stage that trained it on Comparisons.
    comparisons: Comparisons | None = None
    batch: int = 16  # questions answered at once

    def __post_init__(self) -> None:
        if not abs(self.weight) <= LARGEST_REWARD:
            raise ValueError(f"PairModel.weight = {self.weight} must be finite, in float32 too")
        if self.batch < 1:
            raise ValueError(f"PairModel.batch must be at least 1; got {self.batch}")


def component_names(samples: int) -> tuple[str, ...]:
    """Returns the names of the columns of a pair model's scores: the share of wins, and the preference over each
    sample of a prompt (jrl.algos.contract.preferences)."""
    return (WINS, *(f"{PREFERENCE_OVER}{s}" for s in range(samples)))


class _Dispatched(NamedTuple):
    batch: Completions
    pairs: list[tuple[int, int, int]]  # compared pairs: (prompt, sample shown first, sample shown second)
    numbers: list[int]  # index of the question of each pair
    problems: dict[tuple[int, int], str]  # (prompt, sample) -> why a comparison of it was left out
    answers: list[Array]  # on the device, the probability for each question, in batches


def pair_model_source(
    config: PairModel,
    asked: Comparisons,
    prefer: Callable[[TrainState, Sequence[Sequence[int]]], list[Array]],
    tokenizer: Any,
    samples: int,
    longest: int,
) -> RewardSource:
    """Returns a source that rewards a completion by R20, and gives its preference over every other completion of its
    prompt: [i, s] is the probability that i is better than sample s when i is shown first.

    Two completions whose question is too long are not compared; the mean is over the others. A completion that was
    compared with no other has no reward (MISSING) and is masked. Equal texts are compared too: the answer then shows
    the preference for a position. Equal questions are answered once.

    Args:
      asked: the format of the questions.
      prefer: (state, ids of questions) -> the probability that the first of two answers is better, in batches.
      samples: per prompt. longest: most tokens of a question.
    """

    def submit(batch: Completions) -> _Dispatched:
        pairs, numbers, problems = [], [], {}
        questions: dict[tuple[int, ...], int] = {}

        @functools.cache
        def question(prompt: int, first: str, second: str) -> tuple[int, ...]:
            messages = comparison_prompt(asked, batch.visits[prompt].example.messages, first, second)
            return tuple(tokenizer.encode_prompt(messages))

        for prompt in range(len(batch.visits)):
            texts = batch.texts[prompt * samples : (prompt + 1) * samples]
            for i, j in itertools.permutations(range(samples), 2):
                ids = question(prompt, texts[i], texts[j])
                if len(ids) > longest:
                    problem = f"a comparison of it has {len(ids)} tokens, and {longest} are read"
                    problems[prompt, i] = problems[prompt, j] = problem
                    continue
                pairs.append((prompt, i, j))
                numbers.append(questions.setdefault(ids, len(questions)))
        return _Dispatched(batch, pairs, numbers, problems, prefer(batch.state, list(questions)))

    def collect(ticket: _Dispatched) -> LearnedScores:
        prompts = len(ticket.batch.visits)
        preferences = np.full((prompts, samples, samples), np.nan)
        if ticket.pairs:
            answers = np.concatenate(fetch(ticket.answers))
            preferences[tuple(np.array(ticket.pairs).T)] = answers[ticket.numbers]
        wins = np.array([pairwise_scores(matrix) for matrix in preferences]).reshape(-1)
        problems = [""] * len(wins)
        for row in np.flatnonzero(np.isnan(wins)):
            problems[row] = ticket.problems.get(divmod(int(row), samples), "its comparisons are not numbers")
        values = np.concatenate([wins[:, None], preferences.reshape(-1, samples)], axis=1).astype(np.float32)
        weights = (config.weight, *(0.0 for _ in range(samples)))
        return LearnedScores(component_names(samples), weights, values, problems)

    return RewardSource(submit, collect, component_names(samples))
