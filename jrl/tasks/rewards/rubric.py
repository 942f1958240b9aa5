"""Rubric: one reward from a judge's scores of several weighted criteria."""

from __future__ import annotations

import math
from collections.abc import Sequence


def rubric_score(
    scores: Sequence[float],
    weights: Sequence[float],
    critical: Sequence[bool],
    interactions: Sequence[tuple[int, int, float]] = (),
    saturation: float | None = None,
) -> float:
    """Returns R14: sum_j f(w_j s_j) / sum_j |f(w_j)|, and 0 where a critical criterion failed (veto).

    Args:
      scores: K floats in [0, 1], NaN where the judge gave none. weights: K floats; a negative one is a flaw's.
      critical: K; such a criterion has failed where its score is 0, or 1 for a flaw.
      interactions: (i, j, weight): one term more with the score s_i s_j, for criteria that count when both hold.
      saturation: a in f(x) = 2 sigmoid(a x) - 1, by which a term of twice the weight is worth less than twice as much,
        so that one cannot dominate; None: f(x) = x, which it tends to for a small a.

    Returns: a float in [-1, 1]; NaN where a score is missing or all weights are 0.

    Source: open-instruct, which takes 0 for a missing score; a judge that failed has not said 0. Veto, saturation and
    interactions are Rubicon's, 2508.12790, in words; their form is ours.
    """
    weights = [*weights, *(weight for _, _, weight in interactions)]
    total = sum(abs(saturated(weight, saturation)) for weight in weights)
    if not total or any(math.isnan(score) for score in scores):
        return math.nan
    failed = (score == (0 if weight >= 0 else 1) for score, weight in zip(scores, weights))
    if any(is_critical and has_failed for is_critical, has_failed in zip(critical, failed)):
        return 0.0
    scores = [*scores, *(scores[i] * scores[j] for i, j, _ in interactions)]
    return sum(saturated(weight * score, saturation) for weight, score in zip(weights, scores)) / total


def saturated(x: float, steepness: float | None) -> float:
    """Returns R14's 2 sigmoid(steepness x) - 1 of one term; x where the steepness is None."""
    return x if steepness is None else math.tanh(steepness * x / 2)


def stretched(reward: float, steepness: float) -> float:
    """Returns R14's stretch of the top: (exp(steepness R) - 1) / (exp(steepness) - 1) for R > 0, else R as it is.

    0 and 1 stay, and differences near 1 grow: among answers that are all good the best still stands out. NaN stays.

    Args:
      steepness: above 0; the slope at 1 is about 1 + steepness for a large one, and 1 for a small one.

    Source: Rubicon, 2508.12790, in words; the form is ours.
    """
    return math.expm1(steepness * reward) / math.expm1(steepness) if reward > 0 else reward
