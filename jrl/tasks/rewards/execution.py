"""Reward for tests that a program passes. The programs are arithmetic only: jrl has no sandbox for code."""

from __future__ import annotations

import math
from collections.abc import Sequence


def all_passed(passed: Sequence[bool]) -> float:
    """Returns R3, all or nothing: 1 where every test passes, else 0; NaN where there is no test.

    An arithmetic stand-in: `passed` comes from the ExpressionTests verifier, which evaluates expressions in x.
    """
    return math.nan if not passed else float(all(passed))


def staged(runs: bool, passed: Sequence[bool], parsed: float = 0.1, run: float = 0.3) -> float:
    """Returns R3, staged: `parsed` for what can be read, `run` for what has a value on every test, 1 where all of these
    are right; NaN where there is no test. What cannot be read has 0, which its caller gives.

    Compiling and running have their stand-ins in reading an expression and evaluating it.

    Args:
      runs: it has a value on every test. passed: the value is right, by test. parsed, run: 0 <= parsed < run < 1.
    """
    if not passed:
        return math.nan
    return parsed if not runs else float(all(passed)) or run


def speed(passed: Sequence[bool], cost: float, reference_cost: float) -> float:
    """Returns R3, speed: max(0, 1 - cost / reference_cost) where every test passes, else 0; NaN where there is no test,
    or the reference costs nothing.

    Time has its stand-in in the operations of an expression: the same on every machine. 2 of 8: 0.75.
    """
    if not passed or not reference_cost > 0:
        return math.nan
    return max(0.0, 1 - cost / reference_cost) if all(passed) else 0.0


def share_passed(passed: Sequence[bool]) -> float:
    """Returns R3, the fraction: tests passed / tests; NaN where there is no test. An arithmetic stand-in, too."""
    return math.nan if not passed else sum(passed) / len(passed)
