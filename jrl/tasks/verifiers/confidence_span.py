"""ConfidenceSpan: Calibration's reward on the span where the confidence begins, for SaySelf."""

from __future__ import annotations

import dataclasses

from jrl.tasks.example import Example
from jrl.tasks.verdict import Verdict
from jrl.tasks.verifiers import calibration
from jrl.tasks.verifiers.calibration import Calibration


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfidenceSpan(Calibration):
    """Like Calibration, with R21 on the first character of the confidence. SaySelf trains the tokens from there on;
    another use of token rewards would reward only the opening."""


def score(config: ConfidenceSpan, completion: str, example: Example) -> Verdict:
    """Returns Calibration's verdict with a reward of 0, and its reward on the span up to the first character of the
    opening. Without an opening, the span is the whole completion; for an empty text, it is the stop token, if any.

    Raises:
        ValueError: the example has no answer to compare with.
    """
    verdict = calibration.score(config, completion, example)
    start = completion.find(config.opening)
    end = len(completion) if start < 0 else start + 1
    return dataclasses.replace(verdict, reward=0.0, spans=((end, verdict.reward),))
