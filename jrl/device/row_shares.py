"""Rows of tokens divided over the mesh axis `sequence`: each of its S devices has a share of every packed row.

    blocks of a row     0  1  2  3         S = 2: 2 S blocks of L / (2 S) columns
    share 0             0        3
    share 1                1  2

Share s has the blocks s and 2 S - 1 - s, so that attention costs every share the same: late tokens of a row attend to
more than early ones. For everything that treats tokens independently a share is a separate row, [R S, L / S], placed by
BATCH_AXES. Only attention combines shares: queries attend to the keys and values of the whole row, gathered over
`sequence`.

Source: 2407.21783, section 3.3.2 (gathered keys and values, 2 S blocks in this order).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.device.sharding import SEQUENCE, axis_size, constrain, per_shard
from jrl.types import Array


def columns_of_shares(length: int, shares: int) -> np.ndarray:
    """Returns the columns of a row of `length` tokens in each share, [S, L / S] int32."""
    blocks = np.arange(length, dtype=np.int32).reshape(2 * shares, -1)
    return np.stack([np.concatenate([blocks[s], blocks[-1 - s]]) for s in range(shares)])


def cut(x: Array) -> Array:
    """Returns the shares of rows, [R S, L / S, ...], from `x` [R, L, ...], which is replicated over `sequence`."""
    shares = axis_size(SEQUENCE)
    block = x.shape[1] // (2 * shares)

    def device_share(x: Array) -> tuple[Array]:
        share = jax.lax.axis_index(SEQUENCE)
        take = lambda i: jax.lax.dynamic_slice_in_dim(x, i * block, block, axis=1)
        return (jnp.concatenate([take(share), take(2 * shares - 1 - share)], axis=1),)

    rest = (None,) * (x.ndim - 1)
    return per_shard(device_share, (x,), (("rows", *rest),), (("batch", *rest),))[0]


def copied(x: Array) -> Array:
    """Returns the rows `x` [R, ...] repeated for each of their shares, [R S, ...]."""
    rest = (None,) * (x.ndim - 1)
    copy = lambda x: (jax.lax.pcast(x, SEQUENCE, to="varying"),)
    return per_shard(copy, (x,), (("rows", *rest),), (("batch", *rest),))[0]


def joined(x: Array) -> Array:
    """Returns rows [R, L, ...], replicated over `sequence`, from shares `x` [R S, L / S, ...]: the inverse of `cut`."""
    rest = (None,) * (x.ndim - 2)
    shared = per_shard(lambda x: (x,), (x,), (("batch", None, *rest),), (("rows", "columns", *rest),))[0]
    return _in_order(constrain(shared, "rows", None, *rest), axis_size(SEQUENCE), axis=1)


def gathered(x: Array) -> Array:
    """Returns the keys or values of the whole row for every share, [R S, J, L, K], from `x` [R S, J, L / S, K]."""
    shares = axis_size(SEQUENCE)
    heads = ("batch", "kv_heads", None, None)

    def rows(x: Array) -> tuple[Array]:
        return (_in_order(jax.lax.all_gather(x, SEQUENCE, axis=2, tiled=True), shares, axis=2),)

    return per_shard(rows, (x,), (heads,), (heads,))[0]


def _in_order(x: Array, shares: int, axis: int) -> Array:
    """Returns `x` with the blocks along `axis`, which are in order of shares, in order of the row."""
    blocks = jnp.split(x, 2 * shares, axis=axis)
    return jnp.concatenate([*blocks[::2], *blocks[::-2]], axis=axis)
