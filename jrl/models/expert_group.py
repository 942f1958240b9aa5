"""A sparse layer whose experts are sharded by number: the tokens of a group of devices are gathered, each device
multiplies those that go to its own experts, and the sums over experts are scattered back.

    y_t = sum over devices of the group of sum_i weights_ti * expert_i(x_t), over the device's own experts i

No token is dropped and there is no capacity, as a token's result must not depend on the others. A device's own rows
come first in the order of experts and are multiplied a chunk at a time; only filled chunks are visited, so that the
work is that of the device's own rows and memory that of a chunk, however the router decides. The products of a chunk
are computed again on the way back.

Over e devices of t tokens each, (e - 1) t tokens are received and as many sums sent. To send every token to its k
experts' devices and back, t k (e - 1) / e copies each way, moves less where k < e.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.device.sharding import EXPERT, varying_axes
from jrl.models.grouped_product import grouped_product
from jrl.types import Array, PyTree

# (x [rows, D] sorted by expert, weights, product of rows with their experts' matrices, () -> each row's expert, what is
# done to the result of each product) -> [rows, D]
Grouped = Callable[[Array, Array], Array]
Multiply = Callable[[Array, tuple[Array, ...], Grouped, Callable[[], Array], Callable[[Array], Array]], Array]

EXPERT_CHUNKS = "expert_chunks"  # scope of the loops over filled chunks but the first
CHUNK_SHARE = (5, 4)  # rows of a chunk, over those that a device has where experts are visited evenly
MIN_CHUNK = 1024  # rows: fewer are multiplied at once


class _Static(NamedTuple):
    multiply: Multiply
    rows: int  # of a chunk
    count: int  # experts of this device


def mix_group(h: Array, share: Array, ids: Array, *weights: Array, multiply: Multiply, count: int) -> Array:
    """Returns the weighted sum of each token's experts, for one device's rows, [B, L, D]. Called inside a map that is
    manual over the expert axis.

    Args:
      h: [B, L, D]. share: [B, L, k], weights of the token's experts. ids: [B, L, k] int32, which they are.
      weights: of this device's experts, stacked. count: of all.
    """
    here = varying_axes(h).union(*map(varying_axes, weights))
    # Gradients are then summed over tensor, and over copies of the weights, once, after they are scattered.
    h, share, *weights = (jax.lax.pcast(x, tuple(here - varying_axes(x)), to="varying") for x in (h, share, *weights))
    length, width = h.shape[1:]
    h, share, ids = (jax.lax.all_gather(x, EXPERT, tiled=True) for x in (h, share, ids))
    shards = jax.lax.axis_size(EXPERT)
    count //= shards
    expert = ids.reshape(-1) - jax.lax.axis_index(EXPERT).astype(ids.dtype) * count
    expert = jnp.where((expert >= 0) & (expert < count), expert, count)  # of another device: comes last
    static = _Static(multiply, chunk_rows(expert.size, shards), count)
    out = _of_group(static, h.reshape(-1, width), share.reshape(-1, share.shape[-1]), expert, tuple(weights))
    return jax.lax.psum_scatter(out.reshape(-1, length, width), EXPERT, tiled=True)


def chunk_rows(rows: int, shards: int) -> int:
    """Returns the rows of a chunk, of a group's `rows`, tokens times experts of each."""
    more, even = CHUNK_SHARE
    return min(rows, max(MIN_CHUNK, -(-more * rows // (even * shards) // 8) * 8))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_group(static: _Static, x: Array, share: Array, expert: Array, weights: tuple[Array, ...]) -> Array:
    """Returns the sum over this device's experts for every token, [tokens, D], added up in float32 or wider.

    Args:
      x: [tokens, D]. share: [tokens, k]. expert: [tokens * k] int32, this device's, or `static.count`.
    """
    return _forward(static, x, share, expert, weights)[0]


def _forward(static: _Static, x: Array, share: Array, expert: Array, weights: tuple[Array, ...]) -> tuple[Array, tuple]:
    chunks = _chunks(static, expert)

    def add(i: Array | int, out: Array) -> Array:
        chunk = _chunk(static, chunks, expert, i)
        token = chunk.place // share.shape[1]
        y = _outputs(static, chunk, x[token], share.reshape(-1)[chunk.place], weights)
        return out.at[token].add(y)

    out = _over_others(static, chunks, add, add(0, _wide_zeros(x)))
    return out.astype(x.dtype), (x, share, expert, weights)


def _backward(static: _Static, inputs: tuple, gradient: Array) -> tuple:
    x, share, expert, weights = inputs
    chunks = _chunks(static, expert)

    def of_chunk(i: Array | int, of_x: Array, of_share: Array) -> tuple[Array, Array, tuple[Array, ...]]:
        chunk = _chunk(static, chunks, expert, i)
        token = chunk.place // share.shape[1]
        outputs = functools.partial(_outputs, static, chunk)
        _, pull = jax.vjp(outputs, x[token], share.reshape(-1)[chunk.place], weights)
        of_rows, of_shares, of_weights = pull(gradient[token])
        return of_x.at[token].add(of_rows), of_share.at[chunk.place].add(of_shares), jax.tree.map(_wide, of_weights)

    def add(i: Array, sums: tuple) -> tuple:
        of_x, of_share, of_weights = of_chunk(i, *sums[:2])
        return of_x, of_share, jax.tree.map(jnp.add, sums[2], of_weights)

    first = of_chunk(0, _wide_zeros(x), _wide_zeros(share.reshape(-1)))
    of_x, of_share, of_weights = _over_others(static, chunks, add, first)
    of_weights = jax.tree.map(lambda sum_, w: sum_.astype(w.dtype), of_weights, weights)
    return of_x.astype(x.dtype), of_share.reshape(share.shape).astype(share.dtype), None, of_weights


_of_group.defvjp(_forward, _backward)


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _wide_zeros(x: Array) -> Array:
    return _wide(jnp.zeros_like(x))


def _over_others(static: _Static, chunks: _Chunks, add: Callable[[Array, PyTree], PyTree], first: PyTree) -> PyTree:
    """Returns `first` with what the filled chunks but the first add to it."""
    if len(chunks.order) == static.rows:
        return first
    with jax.named_scope(EXPERT_CHUNKS):
        return jax.lax.fori_loop(1, chunks.filled, add, first)


class _Chunks(NamedTuple):
    """All rows, those of this device's experts first, in the order of experts."""

    order: Array  # [rows, up to whole chunks] int32, places in [tokens * k]
    sizes: Array  # [experts] int32, rows of each
    filled: Array  # [] int32, chunks with rows of this device


class _Chunk(NamedTuple):
    place: Array  # [rows] int32, in [tokens * k]
    filled: Array  # [rows] bool
    sizes: Array  # [experts] int32, rows of each
    expert: Array  # [rows] int32


def _chunks(static: _Static, expert: Array) -> _Chunks:
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    sizes = (expert[:, None] == jnp.arange(static.count, dtype=expert.dtype)[None]).sum(0, dtype=jnp.int32)
    return _Chunks(jnp.pad(order, (0, -len(order) % static.rows)), sizes, -(-sizes.sum() // static.rows))


def _chunk(static: _Static, chunks: _Chunks, expert: Array, i: Array | int) -> _Chunk:
    start = i * static.rows
    place = jax.lax.dynamic_slice_in_dim(chunks.order, start, static.rows)
    ends = jnp.cumsum(chunks.sizes)
    inside = lambda at: jnp.clip(at - start, 0, static.rows)
    filled = jnp.arange(static.rows, dtype=jnp.int32) < inside(ends[-1])
    return _Chunk(place, filled, inside(ends) - inside(ends - chunks.sizes), jnp.where(filled, expert[place], 0))


def _outputs(static: _Static, chunk: _Chunk, x: Array, share: Array, weights: tuple[Array, ...]) -> Array:
    """Returns the weighted outputs of a chunk's rows, 0 where it has none: [rows, D].

    What `ragged_dot` leaves in rows beyond those of the experts is not defined; neither it nor its gradient is read.
    """
    only = lambda y: jnp.where(chunk.filled[:, None], y, 0)
    grouped = lambda x, matrices: only(grouped_product(x, matrices, chunk.sizes))
    y = static.multiply(only(x), weights, grouped, lambda: chunk.expert, only)
    return y * jnp.where(chunk.filled, share, 0)[:, None].astype(y.dtype)
