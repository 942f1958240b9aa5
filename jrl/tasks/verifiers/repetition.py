"""Repetition: a penalty for repeated n-grams. For shaping, after the verifier of the answer."""

from __future__ import annotations

import dataclasses

from jrl.tasks.example import Example
from jrl.tasks.rewards.repetition import repetition
from jrl.tasks.verdict import Status, Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repetition:
    """Minus the share of word n-grams that occurred before (R8), in (-1, 0]."""

    weight: float = 1.0  # of this verifier in the reward
    size: int = 4  # words of an n-gram

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"Repetition.size is {self.size}; it must be at least 1")


def score(config: Repetition, completion: str, example: Example) -> Verdict:
    """Returns WRONG with minus the share of repeated n-grams, 0 if nothing is repeated."""
    repeated = repetition(completion.split(), config.size)
    return Verdict(Status.WRONG, -repeated if repeated else 0.0)
