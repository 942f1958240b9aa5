"""Limits that are shares of a count. No JAX."""

from __future__ import annotations


def is_above(count: int, total: int, share: float) -> bool:
    """Returns whether `count` of `total` is more than a share. 29 of 100 is not more than 0.29; it would be by
    the product, 0.29 * 100 = 28.999999999999996."""
    return count > 0 and count / total > share
