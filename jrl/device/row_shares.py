"""Rows of tokens divided over the mesh axis `sequence`: each of its S devices has a share of every packed row.

    blocks of a row     0  1  2  3         S = 2: 2 S blocks of L / (2 S) columns
    share 0             0        3
    share 1                1  2

Share s has the blocks s and 2 S - 1 - s: tokens late in a row see more than early ones, and so every share has as much
of both. A share is a row of its own, [R S, L / S], to all that looks at one token at a time: BATCH_AXES place it. Only
attention knows of the others: a share's queries see keys and values of its row, gathered over `sequence`.

Source: 2407.21783, section 3.3.2 (gathered keys and values, 2 S blocks in this order).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.device.sharding import SEQUENCE, axis_size, constrain, per_shard
from jrl.types import Array


def columns_of_shares(length: int, shares: int) -> np.ndarray:
    """Returns the columns of a row of `length` tokens that every share has, [S, L / S] int32."""
    blocks = np.arange(length, dtype=np.int32).reshape(2 * shares, -1)
    return np.stack([np.concatenate([blocks[s], blocks[-1 - s]]) for s in range(shares)])


def cut(x: Array) -> Array:
    """Returns the shares of rows, [R S, L / S, ...]: `x` [R, L, ...] is on every device of `sequence`."""
    shares = axis_size(SEQUENCE)
    block = x.shape[1] // (2 * shares)

    def own(x: Array) -> tuple[Array]:
        share = jax.lax.axis_index(SEQUENCE)
        take = lambda i: jax.lax.dynamic_slice_in_dim(x, i * block, block, axis=1)
        return (jnp.concatenate([take(share), take(2 * shares - 1 - share)], axis=1),)

    rest = (None,) * (x.ndim - 1)
    return per_shard(own, (x,), (("rows", *rest),), (("batch", *rest),))[0]


def copied(x: Array) -> Array:
    """Returns the rows `x` [R, ...] as each of their shares has them, [R S, ...]."""
    rest = (None,) * (x.ndim - 1)
    own = lambda x: (jax.lax.pcast(x, SEQUENCE, to="varying"),)
    return per_shard(own, (x,), (("rows", *rest),), (("batch", *rest),))[0]


def joined(x: Array) -> Array:
    """Returns the rows of shares `x` [R S, L / S, ...], [R, L, ...] on every device of `sequence`: undoes `cut`."""
    rest = (None,) * (x.ndim - 2)
    shared = per_shard(lambda x: (x,), (x,), (("batch", None, *rest),), (("rows", "columns", *rest),))[0]
    return _in_order(constrain(shared, "rows", None, *rest), axis_size(SEQUENCE), axis=1)


def gathered(x: Array) -> Array:
    """Returns the keys, or values, of its row for every share, [R S, J, L, K], of `x` [R S, J, L / S, K]."""
    shares = axis_size(SEQUENCE)
    heads = ("batch", "kv_heads", None, None)

    def rows(x: Array) -> tuple[Array]:
        return (_in_order(jax.lax.all_gather(x, SEQUENCE, axis=2, tiled=True), shares, axis=2),)

    return per_shard(rows, (x,), (heads,), (heads,))[0]


def _in_order(x: Array, shares: int, axis: int) -> Array:
    """Returns `x` with the blocks along `axis`, which are one share's after another's, as they are in the row."""
    blocks = jnp.split(x, 2 * shares, axis=axis)
    return jnp.concatenate([*blocks[::2], *blocks[::-2]], axis=axis)
