"""Reward for passing tests. The programs are arithmetic expressions only: jrl has no sandbox for code."""

from __future__ import annotations

import math
from collections.abc import Sequence


def all_passed(passed: Sequence[bool]) -> float:
    """Returns R3, all or nothing: 1 if every test passes, else 0; NaN if there are no tests.

    `passed` comes from the ExpressionTests verifier, which evaluates expressions in x in place of programs.
    """
    return math.nan if not passed else float(all(passed))


def staged(runs: bool, passed: Sequence[bool], parsed: float = 0.1, run: float = 0.3) -> float:
    """Returns R3, staged: `parsed` for an expression that parses, `run` if it has a value on every test, 1 if all of
    these values are right; NaN if there are no tests. The caller gives 0 to an expression that does not parse.

    Parsing and evaluating an expression stand in for compiling and running a program.

    Args:
      runs: the expression has a value on every test. passed: for each test, whether the value is right.
      parsed, run: 0 <= parsed < run < 1.
    """
    if not passed:
        return math.nan
    return parsed if not runs else float(all(passed)) or run


def speed(passed: Sequence[bool], cost: float, reference_cost: float) -> float:
    """Returns R3, speed: max(0, 1 - cost / reference_cost) if every test passes, else 0; NaN if there are no tests or
    the reference costs nothing.

    The number of operations in an expression stands in for time and is the same on every machine. 2 of 8: 0.75.
    """
    if not passed or not reference_cost > 0:
        return math.nan
    return max(0.0, 1 - cost / reference_cost) if all(passed) else 0.0


def share_passed(passed: Sequence[bool]) -> float:
    """Returns R3, the fraction: tests passed / tests; NaN if there are no tests."""
    return math.nan if not passed else sum(passed) / len(passed)
