"""Limits that are shares of a count."""

from __future__ import annotations

from jrl.tasks.shares import is_above


def test_a_count_at_the_limit_is_not_above_it():
    for digits in (1, 2, 3):
        total = 10**digits
        for count in range(total + 1):
            share = float(f"{count / total:.{digits}f}")
            assert not is_above(count, total, share) and not is_above(3 * count, 3 * total, share)
            assert is_above(count + 1, total, share)


def test_nothing_is_above_no_limit():
    assert not is_above(0, 0, 0.0) and not is_above(0, 5, 0.0) and is_above(1, 5, 0.0) and not is_above(5, 5, 1.0)
