"""Reward for improving on a reference."""

from __future__ import annotations


def reward_gap(score: float, reference_score: float, same_text: bool) -> float:
    """Returns R26 of an additive judge: score(y) - score(y_ref); exactly 0 where y is y_ref.

    Args:
      score: of the improved text. reference_score: of the text to improve. Either may be NaN: no verdict, no reward.
      same_text: the two texts are equal; what a noisy judge says of each is then no difference.

    Source: PIT, 2310.00898, which trains a model of the difference itself; the additive one needs no training.
    """
    return 0.0 if same_text else score - reference_score
