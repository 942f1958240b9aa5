"""Preference pairs out of the scored samples of a prompt."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.ops import filters, groups, reduce

Array = jax.Array


class Pairs(NamedTuple):
    """Rows by group; -1: the group gives no pair."""

    chosen: Array  # [num_groups] int32
    rejected: Array  # [num_groups] int32


def best_against_worst(
    score: Array, text: Array, group: Array, valid: Array, *, num_groups: int, margin: float
) -> Pairs:
    """Returns F15, max-min: the highest score of each group against the lowest.

    No pair where the scores differ by `margin` or less (so ties give none at 0), where both are the same text, or where
    fewer than two rows are valid. At ties the lowest index counts. A length penalty is the caller's: score = reward -
    w length.

    Args:
      score: [N] float; invalid entries may be NaN. text: [N] int32, equal where two samples are the same text.
      group: [N] int32. valid: [N] bool.

    Source: RLHF Workflow, 2405.07863 section 3.2 (and its code, Online-RLHF). CGPO takes pairs under constraints.
    """
    top = filters.best(score, group, valid, num_groups=num_groups)
    low = filters.best(-reduce.widen(score), group, valid & ~top, num_groups=num_groups)
    return _pairs(top, low, score, text, group, num_groups, margin)


def best_against_random(
    score: Array, text: Array, group: Array, valid: Array, draw: Array, *, num_groups: int, margin: float
) -> Pairs:
    """Returns F15, max-random: the highest score of each group against the one of its others with the highest `draw`.

    Args:
      draw: [N] float, uniform. The rest as in `best_against_worst`.
    """
    top = filters.best(score, group, valid, num_groups=num_groups)
    other = filters.best(draw, group, valid & ~top, num_groups=num_groups)
    return _pairs(top, other, score, text, group, num_groups, margin)


def best_two(score: Array, text: Array, group: Array, valid: Array, *, num_groups: int, margin: float) -> Pairs:
    """Returns F15, max-max: the highest score of each group against the second. Arguments: `best_against_worst`."""
    top = filters.best(score, group, valid, num_groups=num_groups)
    second = filters.best(score, group, valid & ~top, num_groups=num_groups)
    return _pairs(top, second, score, text, group, num_groups, margin)


def _pairs(
    chosen: Array, rejected: Array, score: Array, text: Array, group: Array, num_groups: int, margin: float
) -> Pairs:
    """Returns the rows of two masks with at most one row of a group each, where they make a pair."""
    rows = jnp.arange(score.shape[0], dtype=jnp.int32)
    there = (
        groups.count(group, chosen, num_groups=num_groups) * groups.count(group, rejected, num_groups=num_groups) > 0
    )
    pick = lambda x, mask: jnp.sum(
        jnp.where(mask[:, None] & (group[:, None] == jnp.arange(num_groups)[None, :]), x[:, None], 0), axis=0
    )
    gap = pick(reduce.masked(score, chosen), chosen) - pick(reduce.masked(score, rejected), rejected)
    differ = pick(text, chosen) != pick(text, rejected)
    good = there & differ & (gap > margin)
    return Pairs(jnp.where(good, pick(rows, chosen), -1), jnp.where(good, pick(rows, rejected), -1))
