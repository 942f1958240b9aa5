"""Reward for calibrated confidence."""

from __future__ import annotations

UNPARSABLE = -1.0  # reward if no confidence can be read


def calibration(correct: bool, confidence: float | None) -> float:
    """Returns R21: 1 - 2 (correct - confidence)^2, in [-1, 1]; -1 if there is no confidence in [0, 1].

    Args:
      correct: whether the answer is right. confidence: in [0, 1]; None: none could be read.

    Source: SaySelf, 2405.20974, which trains only the tokens from the confidence on. A reward for the whole completion
    trains all of its tokens.
    """
    if confidence is None or not 0 <= confidence <= 1:
        return UNPARSABLE
    return 1 - 2 * (correct - confidence) ** 2
