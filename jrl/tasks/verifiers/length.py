"""Length: the completion has between `low` and `high` characters."""

from __future__ import annotations

import dataclasses

from jrl.tasks.example import Example
from jrl.tasks.verdict import Status, Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Length:
    """Bounds on the stripped completion, both included, in characters (Unicode code points)."""

    weight: float = 1.0  # of this verifier in the reward
    low: int = 1  # fewest characters
    high: int = 10_000  # most characters

    def __post_init__(self):
        if not 0 <= self.low <= self.high:
            raise ValueError(f"Length has low {self.low} and high {self.high}; they must satisfy 0 <= low <= high")


def score(config: Length, completion: str, example: Example) -> Verdict:
    """Returns CORRECT with reward 1 or WRONG with reward 0. Never UNPARSABLE, since every text has a length."""
    length = len(completion.strip())
    if config.low <= length <= config.high:
        return Verdict(Status.CORRECT, 1.0)
    return Verdict(Status.WRONG, 0.0, f"{length} characters; expected {config.low} to {config.high}")
