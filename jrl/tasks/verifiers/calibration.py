"""Calibration: the completion states its confidence in its answer, and is rewarded for calibrated confidence."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from jrl.tasks.example import Example
from jrl.tasks.rewards.calibration import UNPARSABLE, calibration
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.extract import Extract, extract_answer
from jrl.tasks.verifiers.numeric import read_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """An answer, then <confidence>8</confidence>. The reward is R21, in [-1, 1]."""

    weight: float = 1.0  # of this verifier in the reward
    extract: Extract = "all"  # where the answer before the confidence is
    scale: float = 10.0  # the stated number that means full confidence; 0 means none
    opening: str = "<confidence>"  # the text before the confidence
    closing: str = "</confidence>"  # the text after it

    def __post_init__(self) -> None:
        if not self.opening or not self.closing:
            name = type(self).__name__
            raise ValueError(f"{name}.opening and {name}.closing must be texts, such as '<confidence>'")
        if not self.scale > 0:
            raise ValueError(f"{type(self).__name__}.scale is {self.scale}; it must be above 0")


def score(config: Calibration, completion: str, example: Example) -> Verdict:
    """Returns CORRECT or WRONG, with the reward for the confidence. The answer must equal the example's character for
    character, after stripping both. UNPARSABLE with -1 if the answer or the confidence cannot be read, or text follows.

    Raises:
        ValueError: the example has no answer to compare with.
    """
    if example.answer is None:
        raise ValueError(f"example {example.id!r} has no answer; Calibration needs one")
    answer = read_answer(config, completion)
    confidence = stated_confidence(config, completion)
    if answer is None or confidence is None:
        expected = f"an answer and {config.opening}a number from 0 to {config.scale:g}{config.closing} at the end"
        return Verdict(Status.UNPARSABLE, UNPARSABLE, f"there is not {expected}")
    correct = answer == example.answer.strip()
    return Verdict(Status.CORRECT if correct else Status.WRONG, calibration(correct, confidence))


def read_answer(config: Calibration, completion: str) -> str | None:
    """Returns the answer before the confidence."""
    return extract_answer(completion.partition(config.opening)[0], config.extract)


def stated_confidence(config: Calibration, completion: str) -> float | None:
    """Returns the confidence that a completion states, in [0, 1]; None if it does not end with a valid one."""
    content, closing, after = completion.partition(config.opening)[2].partition(config.closing)
    number = read_number(content)
    confidence = None if number is None else number / Fraction(config.scale)
    is_valid = closing and not after.strip() and confidence is not None and 0 <= confidence <= 1
    return float(confidence) if is_valid else None
