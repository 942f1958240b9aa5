"""Conditions under `vmap` over the members of a population, for loops and branches that all members take together.

If a loop's condition differs between members, JAX selects every carried array for every member in every iteration; a
branch is computed on both sides. `any_member` and `most_of_members` make a condition the same for all members, so that
a loop runs as long as any member needs it, and `where_member` discards the results of the other members. Outside `vmap`
each of the three returns its argument and compiles to nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

Array = jax.Array


@custom_vmap
def any_member(condition: Array) -> Array:
    """Returns whether `condition`, [] bool, holds: under `vmap`, for any member."""
    return condition


@any_member.def_vmap
def _any_member(size: int, batched: list[bool], condition: Array) -> tuple[Array, bool]:
    return (condition.any(axis=0) if batched[0] else condition), False


@custom_vmap
def most_of_members(count: Array) -> Array:
    """Returns `count`, [] integer: under `vmap`, that of the member with the most."""
    return count


@most_of_members.def_vmap
def _most_of_members(size: int, batched: list[bool], count: Array) -> tuple[Array, bool]:
    return (count.max(axis=0) if batched[0] else count), False


def where_member(condition: Array, new: Any, old: Any) -> Any:
    """Returns `new`, a tree of arrays; under `vmap`, `old` for the members whose `condition`, [] bool, does not hold.

    For code after `any_member` and `most_of_members`, which a single run reaches only if its condition holds.
    """
    return jax.tree.map(lambda x, y: _where_member(condition, x, y), new, old)


@custom_vmap
def _where_member(condition: Array, new: Array, old: Array) -> Array:
    return new


@_where_member.def_vmap
def _select(size: int, batched: list[bool], condition: Array, new: Array, old: Array) -> tuple[Array, bool]:
    condition, new, old = (
        x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_batched in zip((condition, new, old), batched)
    )
    like = jax.typeof(new).sharding
    like = None if like.mesh.empty else like
    return jnp.where(jax.lax.broadcast_in_dim(condition, new.shape, (0,), out_sharding=like), new, old), True
