"""How often a trained model's reward prefers the right sum to a wrong one, on pairs like those that it has learned from
and on others: one-digit sums, of which both numbers were at most SEEN, and wrong by 1 to 3 too many.

The explicit reward is that of the role `reward`. The implicit one is what DPO has made of the policy,
log pi(y | x) - log pi_before(y | x), summed over the answer's tokens, where `before` is the policy after imitation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jrl.run.trained import Trained, open_trained
from jrl.tasks.example import Message
from jrl.tools.score import score, score_rewards

SEEN = 6  # the largest number in the pairs of training
IMITATION = "sft"  # the stage after which DPO begins


class Pair(NamedTuple):
    prompt: str
    right: str
    wrong: str


def pairs(seen: bool, mistakes: Sequence[int]) -> list[Pair]:
    """Returns the pairs of all one-digit sums whose numbers are both at most SEEN, or of the others; their wrong
    answers are off by each of `mistakes`, where that is no negative number."""
    sums = [(a, b) for a in range(10) for b in range(10) if (max(a, b) <= SEEN) == seen]
    return [Pair(f"{a}+{b}=", str(a + b), str(a + b + d)) for a, b in sums for d in mistakes if a + b + d >= 0]


SHIFTS = {
    "no shift": pairs(True, (1, 2, 3)),
    "other prompts": pairs(False, (1, 2, 3)),
    "other mistakes": pairs(True, (-1, -2, -3)),
}


def accuracy(right: np.ndarray, wrong: np.ndarray) -> float:
    """Returns the share of pairs whose right answer has the higher reward; a tie counts half (M13). [n] float each."""
    return float(np.mean(0.5 * (1 + np.sign(right - wrong))))


def accuracies(run: Path, explicit: bool) -> dict[str, float]:
    """Returns the accuracy of a run's reward on the pairs of each shift, by its name."""
    reward = explicit_reward(run) if explicit else implicit_reward(run)
    found = {}
    for name, given in SHIFTS.items():
        values = reward([(pair.prompt, text) for pair in given for text in (pair.right, pair.wrong)])
        found[name] = accuracy(values[::2], values[1::2])
    return found


Reward = Callable[[Sequence[tuple[str, str]]], np.ndarray]  # of (prompt, answer) pairs, [n] float


def explicit_reward(run: Path) -> Reward:
    trained = open_trained(run, role="reward")
    return lambda texts: score_rewards(trained, [[*itertools.chain(*sequence(trained, *text))] for text in texts])


def implicit_reward(run: Path) -> Reward:
    after, before = open_trained(run), open_trained(run, stage=IMITATION)

    def reward(texts: Sequence[tuple[str, str]]) -> np.ndarray:
        parts = [sequence(after, *text) for text in texts]
        gains = [x - y for x, y in zip(*(score(trained, [p + c for p, c in parts]) for trained in (after, before)))]
        return np.array([gain[len(prompt) :].sum() for gain, (prompt, _) in zip(gains, parts)])

    return reward


def sequence(trained: Trained, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Returns the ids of a prompt, and those of an answer with the end token."""
    tokenizer = trained.policy.tokenizer
    return [*tokenizer.encode_prompt((Message("user", prompt),))], [*tokenizer.encode(answer), tokenizer.end_id]
