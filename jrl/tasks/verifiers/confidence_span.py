"""ConfidenceSpan: the reward of Calibration on the span with which the confidence begins, for SaySelf."""

from __future__ import annotations

import dataclasses

from jrl.tasks.example import Example
from jrl.tasks.verdict import Verdict
from jrl.tasks.verifiers import calibration
from jrl.tasks.verifiers.calibration import Calibration


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfidenceSpan(Calibration):
    """As Calibration, with R21 on the first character of the confidence. SaySelf learns from there on; what reads
    rewards of tokens otherwise would reward the opening alone."""


def score(config: ConfidenceSpan, completion: str, example: Example) -> Verdict:
    """Returns Calibration's verdict with a reward of 0, and its reward on the span up to the first character of the
    opening; where no confidence begins, on the whole completion: of an empty text on the stop token, if there is one.

    Raises:
        ValueError: the example has no answer to compare with.
    """
    found = calibration.score(config, completion, example)
    begins = completion.find(config.opening)
    end = len(completion) if begins < 0 else begins + 1
    return dataclasses.replace(found, reward=0.0, spans=((end, found.reward),))
