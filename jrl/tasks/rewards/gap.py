"""Reward for improving on a reference."""

from __future__ import annotations


def reward_gap(score: float, reference_score: float, same_text: bool) -> float:
    """Returns R26 for an additive judge: score(y) - score(y_ref); exactly 0 if y is y_ref.

    Args:
      score: of the improved text. reference_score: of the text to improve. If either is NaN (no verdict), so is the
        reward.
      same_text: the two texts are equal; a noisy judge's scores of them may still differ, so they are ignored.

    Source: PIT, 2310.00898, which trains a model of the difference itself; the additive form needs no training.
    """
    return 0.0 if same_text else score - reference_score
