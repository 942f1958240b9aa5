"""Outcome reward: for a right answer, or for the constraints that a completion meets."""

from __future__ import annotations

import math
from collections.abc import Sequence


def outcome(correct: bool, scale: float = 1.0) -> float:
    """Returns R1: scale if the answer is right, else 0.

    Args:
      scale: 1 by default; open-instruct uses 10, which matters to methods that do not divide by a standard deviation.
        In jrl, the verifier's weight is the scale.

    Source: Tulu 3, 2411.15124.
    """
    return scale if correct else 0.0


def constraints_met(met: Sequence[bool], *, partial: bool, scale: float = 1.0) -> float:
    """Returns R1 of several constraints: scale times the share of those met if `partial`, else scale if all are met
    and 0 otherwise; NaN if there are none.

    Source: IFBench, 2507.02833, and IFEval.
    """
    if not met:
        return math.nan
    return scale * (sum(met) / len(met) if partial else float(all(met)))
