"""Conditions of the sampler's loops. Batch shards along the expert axis exchange tokens in sparse layers, so they run
every iteration and branch together, as the members of a population do (`jrl.ops.members`).

A shard that has nothing to do takes part in the exchange and keeps its values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jrl.device.sharding import EXPERT, axis_size
from jrl.ops.members import any_member, most_of_members, where_member
from jrl.types import Array


def any_shard(condition: Array) -> Array:
    """Returns whether `condition`, [] bool, holds for any member, and any shard along the expert axis."""
    condition = any_member(condition)
    return condition if axis_size(EXPERT) == 1 else jax.lax.pmax(condition.astype(jnp.int32), EXPERT) > 0


def most_of_shards(count: Array) -> Array:
    """Returns the largest `count`, [] integer, of all members, and all shards along the expert axis."""
    count = most_of_members(count)
    return count if axis_size(EXPERT) == 1 else jax.lax.pmax(count, EXPERT)


def where_shard(condition: Array, new: Any, old: Any) -> Any:
    """Returns `new`, a tree of arrays; `old` for members and shards for which `condition`, [] bool, does not hold.

    Call it after `any_shard` or `most_of_shards`: a single shard comes here only if its condition holds.
    """
    if axis_size(EXPERT) == 1:
        return where_member(condition, new, old)
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)
