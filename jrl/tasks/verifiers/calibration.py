"""Calibration: the completion says how sure it is of its answer, and is rewarded for being as sure as it is right."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from jrl.tasks.example import Example
from jrl.tasks.rewards.calibration import UNPARSABLE, calibration
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.extract import Extract, extract_answer
from jrl.tasks.verifiers.numeric import read_number

OPENING, CLOSING = "<confidence>", "</confidence>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """An answer, then <confidence>8</confidence>. The reward is R21, in [-1, 1]."""

    weight: float = 1.0  # of this verifier in the reward
    extract: Extract = "all"  # the place of the answer before the confidence
    scale: float = 10.0  # the confidence of someone who is certain; 0 is that of someone who guesses

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"Calibration.scale is {self.scale}; it must be above 0")


def score(config: Calibration, completion: str, example: Example) -> Verdict:
    """Returns CORRECT or WRONG by the answer, which must be the example's character for character, with the reward of
    its confidence; UNPARSABLE with -1 where either cannot be read or text follows.

    Raises:
        ValueError: the example has no answer to compare with.
    """
    if example.answer is None:
        raise ValueError(f"example {example.id!r} has no answer; Calibration needs one")
    answer = extract_answer(completion.partition(OPENING)[0], config.extract)
    sure = stated_confidence(config, completion)
    if answer is None or sure is None:
        wanted = f"an answer and {OPENING}a number from 0 to {config.scale:g}{CLOSING} at the end"
        return Verdict(Status.UNPARSABLE, UNPARSABLE, f"there is not {wanted}")
    correct = answer == example.answer.strip()
    return Verdict(Status.CORRECT if correct else Status.WRONG, calibration(correct, sure))


def stated_confidence(config: Calibration, completion: str) -> float | None:
    """Returns how sure a completion says that it is, in [0, 1]; None where it does not end by saying so."""
    said, closing, after = completion.partition(OPENING)[2].partition(CLOSING)
    number = read_number(said)
    sure = None if number is None else number / Fraction(config.scale)
    return None if not closing or after.strip() or sure is None or not 0 <= sure <= 1 else float(sure)
