"""Reward for tests that a program passes. The programs are arithmetic only: jrl has no sandbox for code."""

from __future__ import annotations

import math
from collections.abc import Sequence


def all_passed(passed: Sequence[bool]) -> float:
    """Returns R3, all or nothing: 1 where every test passes, else 0; NaN where there is no test.

    An arithmetic stand-in: `passed` comes from the ExpressionTests verifier, which evaluates expressions in x.
    """
    return math.nan if not passed else float(all(passed))


def share_passed(passed: Sequence[bool]) -> float:
    """Returns R3, the fraction: tests passed / tests; NaN where there is no test. An arithmetic stand-in, too."""
    return math.nan if not passed else sum(passed) / len(passed)
