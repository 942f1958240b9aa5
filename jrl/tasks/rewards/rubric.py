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
    """Returns R14: sum_j f(w_j s_j) / sum_j |f(w_j)|, or 0 if a critical criterion failed (veto).

    Args:
      scores: K floats in [0, 1], NaN if the judge gave none. weights: K floats; the weight of a flaw is negative.
      critical: K; a critical criterion fails if its score is 0, or 1 for a flaw.
      interactions: (i, j, weight): an extra term with the score s_i s_j, for criteria that count when both hold.
      saturation: a in f(x) = 2 sigmoid(a x) - 1, where doubling a term's weight less than doubles its value, so that no
        term can dominate; None: f(x) = x, the limit for small a, up to scale.

    Returns: a float in [-1, 1]; NaN if a score is missing or all weights are 0.

    Source: open-instruct, which takes 0 for a missing score; here it stays missing, as a failed judge gave no score.
    Rubicon, 2508.12790, describes veto, saturation and interactions in words; the formulas are ours.
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
    """Returns R14's 2 sigmoid(steepness x) - 1 of one term; x if the steepness is None."""
    return x if steepness is None else math.tanh(steepness * x / 2)


def stretched(reward: float, steepness: float) -> float:
    """Returns R14's stretch of high rewards: (exp(steepness R) - 1) / (exp(steepness) - 1) for R > 0, else R.

    0, 1 and NaN are unchanged. Differences near 1 grow, so the best of several good answers still stands out.

    Args:
      steepness: above 0; the slope at 1 is about `steepness` if that is large, and tends to 1 as it tends to 0.

    Source: Rubicon, 2508.12790, in words; the formula is ours.
    """
    return math.expm1(steepness * reward) / math.expm1(steepness) if reward > 0 else reward
