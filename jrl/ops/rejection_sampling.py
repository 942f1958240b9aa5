"""Which samples of a prompt are good enough to imitate: best of n (RAFT) and a threshold (expert iteration).

Both return the weight of a row in a likelihood loss, -weight * logprobs; 0 leaves the row out. Weights do not depend on
the order of rows: among rows that are alike none is picked, they share. Nothing is deduplicated.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import groups, reduce

Array = jax.Array


def best_of_group(reward: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns L14 for RAFT: 1 on the best row of each group, 0 elsewhere; n rows that tie for it have 1 / n each.

    That is what a fair draw among them would give on average. A group whose rewards are all equal has no best row and
    is left out, as is a group of one.

    Args:
      reward: [N] float; invalid entries may be NaN. group: [N] int32 in 0..num_groups-1. valid: [N] bool.

    Returns:
      [N] float32 or wider.

    Source: Dong et al. 2304.06767, 8 to 32 samples a prompt.
    """
    reward = reduce.masked(reward, valid)
    top = groups.to_rows(_finite(groups.maximum(reward, group, valid, num_groups=num_groups)), group)
    varied = groups.to_rows(groups.varied(reward, group, valid, num_groups=num_groups), group)
    best = valid & varied & (reward == top)
    return _shared(best, group, 1.0, num_groups, reward.dtype)


def above_threshold(
    reward: Array, group: Array, valid: Array, *, num_groups: int, threshold: float, max_kept: float
) -> Array:
    """Returns L14 for expert iteration: 1 on every row whose reward is at least the threshold, 0 elsewhere; where a
    group has n > max_kept such rows they have max_kept / n each, so that easy prompts do not dominate.

    Args:
      reward, group, valid: as in `best_of_group`. max_kept: above 0, total weight that a prompt may have.

    Returns:
      [N] float32 or wider.

    Source: rejection sampling as in Xin et al. 2405.14333 (DeepSeek-Prover).
    """
    reward = reduce.masked(reward, valid)
    return _shared(valid & (reward >= threshold), group, max_kept, num_groups, reward.dtype)


def _shared(rows: Array, group: Array, most: float, num_groups: int, dtype: jnp.dtype) -> Array:
    count = groups.to_rows(groups.count(group, rows, num_groups=num_groups), group)
    return jnp.where(rows, jnp.minimum(1.0, most / jnp.maximum(count, 1)), 0).astype(dtype)


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, 0)
