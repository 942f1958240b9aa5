"""Hindsight reward: the judge sees a completion together with its outcome."""

from __future__ import annotations

import math


def hindsight_reward(score: float, outcome: str | None) -> float:
    """Returns R25, judge(x, y, outcome) instead of judge(x, y); NaN, a missing reward, without an outcome.

    Args:
      score: from a judge that has seen the outcome: it judges a completion by what it leads to, not by how good it
        looks.
      outcome: what happened next, from a simulation of the user or of the world; None or blank: the simulation failed.

    Source: RLHS, 2501.08617, with one simulated continuation; there, one model simulates and another judges.
    """
    return score if outcome is not None and outcome.strip() else math.nan
