"""Reward in hindsight: what is judged is a completion with what came of it."""

from __future__ import annotations

import math


def hindsight_reward(score: float, outcome: str | None) -> float:
    """Returns R25, judge(x, y, outcome) in the place of judge(x, y); NaN, a missing reward, without an outcome.

    Args:
      score: of a judge that has seen the outcome, so that a completion that only looks good is judged by what it leads
        to.
      outcome: what happened next, from a simulation of the user or of the world; None or blank: the simulation failed.

    Source: RLHS, 2501.08617, with one simulated continuation; there another model simulates it than judges.
    """
    return score if outcome is not None and outcome.strip() else math.nan
