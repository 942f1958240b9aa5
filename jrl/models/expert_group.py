"""Expert parallelism for a sparse layer, whose experts are sharded by index: the tokens of a group of devices are
gathered, each device computes those that go to its own experts, and the sums over experts are scattered back.

    y_t = sum over devices of the group of sum_i weights_ti * expert_i(x_t), over the device's own experts i

No token is dropped and there is no capacity limit: a token's result must not depend on the other tokens. A device's own
rows come first, sorted by expert, and are multiplied a chunk at a time. The first chunk is always visited, later ones
only if they hold rows: however the router decides, the work is that of the device's own rows, in whole chunks, and the
memory that of one chunk. The backward pass recomputes the products of each chunk.

With e devices of t tokens each, a device receives (e - 1) t tokens and sends as many sums. Sending every token to the
devices of its k experts and back, t k (e - 1) / e copies each way, moves less where k < e.
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

# (rows [rows, in] sorted by expert, matrices [experts, in, out] of the device's experts) -> each row times its expert's
# matrix, [rows, out]
Grouped = Callable[[Array, Array], Array]
# (x [rows, D] sorted by expert, weights, grouped product, () -> each row's expert, function applied to the result of
# each product) -> [rows, D]
Multiply = Callable[[Array, tuple[Array, ...], Grouped, Callable[[], Array], Callable[[Array], Array]], Array]

EXPERT_CHUNKS = "expert_chunks"  # named scope of the loops over the filled chunks after the first
CHUNK_SHARE = (5, 4)  # ratio of a chunk's rows to those that a device has if routing is even
MIN_CHUNK = 1024  # rows: fewer are one chunk


class _Static(NamedTuple):
    multiply: Multiply
    rows: int  # per chunk
    count: int  # experts on this device


def mix_group(h: Array, share: Array, ids: Array, *weights: Array, multiply: Multiply, count: int) -> Array:
    """Returns the weighted sum of each token's experts, for one device's rows, [B, L, D]. Called where the mesh's
    expert axis is manual.

    Args:
      h: [B, L, D]. share: [B, L, k], weights of each token's experts. ids: [B, L, k] int32, the experts.
      weights: of this device's experts, stacked. count: experts on all devices.
    """
    here = varying_axes(h).union(*map(varying_axes, weights))
    # With this cast, gradients are summed over `tensor`, and over copies of the weights, once, after the scatter.
    h, share, *weights = (jax.lax.pcast(x, tuple(here - varying_axes(x)), to="varying") for x in (h, share, *weights))
    length, width = h.shape[1:]
    h, share, ids = (jax.lax.all_gather(x, EXPERT, tiled=True) for x in (h, share, ids))
    shards = jax.lax.axis_size(EXPERT)
    count //= shards
    expert = ids.reshape(-1) - jax.lax.axis_index(EXPERT).astype(ids.dtype) * count
    expert = jnp.where((expert >= 0) & (expert < count), expert, count)  # another device's experts sort last
    static = _Static(multiply, chunk_rows(expert.size, shards), count)
    out = _of_group(static, h.reshape(-1, width), share.reshape(-1, share.shape[-1]), expert, tuple(weights))
    return jax.lax.psum_scatter(out.reshape(-1, length, width), EXPERT, tiled=True)


def chunk_rows(rows: int, shards: int) -> int:
    """Returns the number of rows in a chunk. rows: of the group of devices, tokens times experts per token."""
    more, even = CHUNK_SHARE
    return min(rows, max(MIN_CHUNK, -(-more * rows // (even * shards) // 8) * 8))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_group(static: _Static, x: Array, share: Array, expert: Array, weights: tuple[Array, ...]) -> Array:
    """Returns the sum over this device's experts for every token, [tokens, D], accumulated in float32 or wider.

    Args:
      x: [tokens, D]. share: [tokens, k]. expert: [tokens * k] int32, index among this device's experts;
        `static.count` for another device's.
    """
    return _forward(static, x, share, expert, weights)[0]


def _forward(static: _Static, x: Array, share: Array, expert: Array, weights: tuple[Array, ...]) -> tuple[Array, tuple]:
    chunks = _chunks(static, expert)

    def add(i: Array | int, out: Array) -> Array:
        chunk = _chunk(static, chunks, expert, i)
        token = chunk.place // share.shape[1]
        y = _outputs(static, chunk, x[token], share.reshape(-1)[chunk.place], weights)
        return out.at[token].add(y)

    out = _over_later_chunks(static, chunks, add, add(0, _wide_zeros(x)))
    return out.astype(x.dtype), (x, share, expert, weights)


def _backward(static: _Static, inputs: tuple, gradient: Array) -> tuple:
    x, share, expert, weights = inputs
    chunks = _chunks(static, expert)

    def add_chunk(i: Array | int, grad_x: Array, grad_share: Array) -> tuple[Array, Array, tuple[Array, ...]]:
        chunk = _chunk(static, chunks, expert, i)
        token = chunk.place // share.shape[1]
        outputs = functools.partial(_outputs, static, chunk)
        _, vjp = jax.vjp(outputs, x[token], share.reshape(-1)[chunk.place], weights)
        grad_rows, grad_shares, grad_weights = vjp(gradient[token])
        grad_weights = jax.tree.map(_wide, grad_weights)
        return grad_x.at[token].add(grad_rows), grad_share.at[chunk.place].add(grad_shares), grad_weights

    def add(i: Array, sums: tuple) -> tuple:
        grad_x, grad_share, grad_weights = add_chunk(i, *sums[:2])
        return grad_x, grad_share, jax.tree.map(jnp.add, sums[2], grad_weights)

    first = add_chunk(0, _wide_zeros(x), _wide_zeros(share.reshape(-1)))
    grad_x, grad_share, grad_weights = _over_later_chunks(static, chunks, add, first)
    grad_weights = jax.tree.map(lambda sum_, w: sum_.astype(w.dtype), grad_weights, weights)
    return grad_x.astype(x.dtype), grad_share.reshape(share.shape).astype(share.dtype), None, grad_weights


_of_group.defvjp(_forward, _backward)


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _wide_zeros(x: Array) -> Array:
    return _wide(jnp.zeros_like(x))


def _over_later_chunks(
    static: _Static, chunks: _Chunks, add: Callable[[Array, PyTree], PyTree], first: PyTree
) -> PyTree:
    """Returns `first` plus the contributions of the filled chunks after the first."""
    if len(chunks.order) == static.rows:
        return first
    with jax.named_scope(EXPERT_CHUNKS):
        return jax.lax.fori_loop(1, chunks.filled, add, first)


class _Chunks(NamedTuple):
    """All rows: those of this device's experts first, sorted by expert."""

    order: Array  # [rows, padded to whole chunks] int32, indices into [tokens * k]
    sizes: Array  # [experts] int32, rows per expert
    filled: Array  # [] int32, number of chunks with rows of this device


class _Chunk(NamedTuple):
    place: Array  # [rows] int32, indices into [tokens * k]
    filled: Array  # [rows] bool, the row belongs to this device
    sizes: Array  # [experts] int32, rows per expert in this chunk
    expert: Array  # [rows] int32, index among this device's experts; 0 where not filled


def _chunks(static: _Static, expert: Array) -> _Chunks:
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    sizes = (expert[:, None] == jnp.arange(static.count, dtype=expert.dtype)[None]).sum(0, dtype=jnp.int32)
    return _Chunks(jnp.pad(order, (0, -len(order) % static.rows)), sizes, -(-sizes.sum() // static.rows))


def _chunk(static: _Static, chunks: _Chunks, expert: Array, i: Array | int) -> _Chunk:
    start = i * static.rows
    place = jax.lax.dynamic_slice_in_dim(chunks.order, start, static.rows)
    ends = jnp.cumsum(chunks.sizes)
    clipped = lambda row: jnp.clip(row - start, 0, static.rows)
    filled = jnp.arange(static.rows, dtype=jnp.int32) < clipped(ends[-1])
    return _Chunk(place, filled, clipped(ends) - clipped(ends - chunks.sizes), jnp.where(filled, expert[place], 0))


def _outputs(static: _Static, chunk: _Chunk, x: Array, share: Array, weights: tuple[Array, ...]) -> Array:
    """Returns the weighted outputs of a chunk's rows, [rows, D]; 0 in rows that are not filled.

    `ragged_dot` leaves the rows past the experts' own undefined, so they and their gradients are masked.
    """
    masked = lambda y: jnp.where(chunk.filled[:, None], y, 0)
    grouped = lambda x, matrices: masked(grouped_product(x, matrices, chunk.sizes))
    y = static.multiply(masked(x), weights, grouped, lambda: chunk.expert, masked)
    return y * jnp.where(chunk.filled, share, 0)[:, None].astype(y.dtype)
