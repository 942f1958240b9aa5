"""Advantages, losses, KL terms, reductions and values against plain loops, with derivatives taken by hand.

The loops are those of benchmarks/agreement, which were written before the functions were read; `python -m
benchmarks.agreement` takes 1,000 cases and the functions of other libraries too. Masked entries hold NaN.
"""

from __future__ import annotations

import pytest

from benchmarks.agreement.compare import BAR, against_loop, loop_of, parts_compared

PARTS = {part["function"].rpartition(":")[2]: part for part in parts_compared() if loop_of(part) is not None}


@pytest.mark.parametrize("name", PARTS)
def test_it_equals_a_plain_loop(name):
    value, slope = against_loop(PARTS[name], count=20, seed=0)
    assert value <= BAR
    assert slope is None or slope <= BAR
