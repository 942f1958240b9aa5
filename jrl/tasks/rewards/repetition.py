"""Penalty for repetition."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def repetition(units: Sequence[Hashable], size: int) -> float:
    """Returns R8's repetition: 1 - distinct n-grams / n-grams, in [0, 1); 0 if there are fewer than `size` units.

    The reward is this times a negative weight.

    Args:
      units: tokens or words. size: n, at least 1.
    """
    ngrams = [tuple(units[i : i + size]) for i in range(len(units) - size + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
