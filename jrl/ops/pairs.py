"""Which of a prompt's samples are compared with one another."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import groups

Array = jax.Array


def best_against_worst(
    reward: Array, group: Array, valid: Array, *, num_groups: int, margin: float
) -> tuple[Array, Array]:
    """Returns F15, max-min: of each group the row of the highest reward is preferred to that of the lowest.

    Of equal rewards the first row is taken (E11). No pair where the two differ by `margin` or less, so that a group of
    equal rewards has none.

    Args:
      reward: [N] float; invalid entries may be NaN. group: [N] int32 in 0..num_groups-1. valid: [N] bool.
      margin: at least 0.

    Returns:
      label [N] float32, 1: preferred, 0: not; unit [N] int32, the group of a pair's rows, -1 for all others.

    Source: RLHF Workflow, 2405.07863, which also drops pairs of one text; equal texts have equal rewards here.
    """
    static = {"num_groups": num_groups}
    high = groups.maximum(reward, group, valid, **static)
    low = groups.minimum(reward, group, valid, **static)
    index = jnp.arange(reward.shape[0], dtype=jnp.int32)
    first = lambda value: groups.to_rows(
        groups.first_row(valid & (reward == groups.to_rows(value, group)), group, **static), group
    )
    best, worst = index == first(high), index == first(low)
    apart = groups.to_rows(high - low > margin, group)
    return (best & apart).astype(jnp.float32), jnp.where((best | worst) & apart, group, -1)
