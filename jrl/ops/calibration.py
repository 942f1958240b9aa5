"""How well confidences match the probability of being right (M12). Host only: numpy, float64."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def brier(confidence: Array, correct: Array) -> float:
    """Returns M12's Brier score, mean (c - y)^2; NaN without answers.

    Args:
      confidence: [n] float in [0, 1]. correct: [n] bool or 0 and 1.
    """
    confidence, correct = _checked(confidence, correct)
    return float(np.mean((confidence - correct) ** 2)) if len(confidence) else float("nan")


def expected_calibration_error(confidence: Array, correct: Array, *, bins: int = 10) -> float:
    """Returns M12's ECE, sum_b n_b / n |accuracy_b - mean confidence_b| over equal-width bins of confidence, without
    empty ones; NaN without answers. A confidence on an edge is in the upper bin, 1 in the last one.

    Source: Guo et al. 1706.04599 eq. 3.
    """
    confidence, correct = _checked(confidence, correct)
    if not len(confidence):
        return float("nan")
    place = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    total = lambda values: np.bincount(place, values, minlength=bins)
    return float(np.abs(total(correct) - total(confidence)).sum() / len(confidence))


def auroc(confidence: Array, correct: Array) -> float:
    """Returns M12's AUROC by ranks: the probability that a right answer has a higher confidence than a wrong one, ties
    counting half; NaN if there are no right or no wrong answers."""
    confidence, correct = _checked(confidence, correct)
    right, wrong = confidence[correct == 1], np.sort(confidence[correct == 0])
    if not len(right) or not len(wrong):
        return float("nan")
    below = np.searchsorted(wrong, right, "left") + np.searchsorted(wrong, right, "right")
    return float(below.mean() / (2 * len(wrong)))


def _checked(confidence: Array, correct: Array) -> tuple[Array, Array]:
    confidence, correct = np.asarray(confidence, np.float64), np.asarray(correct, np.float64)
    if confidence.shape != correct.shape or confidence.ndim != 1:
        raise ValueError(f"expected confidences and outcomes [n], got {confidence.shape} and {correct.shape}")
    if not ((confidence >= 0) & (confidence <= 1)).all() or not np.isin(correct, (0, 1)).all():
        raise ValueError("confidences must be between 0 and 1, and outcomes 0 or 1")
    return confidence, correct
