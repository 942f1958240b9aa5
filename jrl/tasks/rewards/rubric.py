"""Rubric: one reward from a judge's scores of several weighted criteria."""

from __future__ import annotations

import math
from collections.abc import Sequence


def rubric_score(scores: Sequence[float], weights: Sequence[float], critical: Sequence[bool]) -> float:
    """Returns R14: sum_j w_j s_j / sum_j |w_j|, and 0 where a critical criterion failed (veto).

    Args:
      scores: K floats in [0, 1], NaN where the judge gave none. weights: K floats; a negative one is a flaw's.
      critical: K; such a criterion has failed where its score is 0, or 1 for a flaw.

    Returns: a float in [-1, 1]; NaN where a score is missing or all weights are 0.

    Source: open-instruct, which takes 0 for a missing score; a judge that failed has not said 0. The veto is Rubicon's,
    2508.12790.
    """
    total = sum(abs(weight) for weight in weights)
    if not total or any(math.isnan(score) for score in scores):
        return math.nan
    failed = (score == (0 if weight >= 0 else 1) for score, weight in zip(scores, weights))
    if any(is_critical and has_failed for is_critical, has_failed in zip(critical, failed)):
        return 0.0
    return sum(weight * score for weight, score in zip(weights, scores)) / total
