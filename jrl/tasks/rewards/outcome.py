"""Reward for the outcome: an answer that is right, or constraints that a completion meets."""

from __future__ import annotations

import math
from collections.abc import Sequence


def outcome(correct: bool, scale: float = 1.0) -> float:
    """Returns R1: scale where the answer is right, else 0.

    Args:
      scale: 1; open-instruct has 10, which matters to methods that do not divide by a standard deviation. Here it is
        the weight of the verifier.

    Source: Tulu 3, 2411.15124.
    """
    return scale if correct else 0.0


def constraints_met(met: Sequence[bool], *, partial: bool, scale: float = 1.0) -> float:
    """Returns R1 of several constraints: scale times the share that is met where `partial`, else scale only where all
    are met; NaN where there is none.

    Source: IFBench, 2507.02833, and IFEval.
    """
    if not met:
        return math.nan
    return scale * (sum(met) / len(met) if partial else float(all(met)))
