"""Pallas TPU kernel for attention of one new token per row over a one-block cache: for every row it fetches only the
blocks of columns that the row's token sees, one at a time, for all heads at once. The reference is
`cached.attend_cached`. Compiled for TPUs and interpreted on CPUs so far; no TPU has run it.

Source: the running softmax is that of Milakov and Gimelshein 2018 (1805.02867), as in FlashAttention (2205.14135).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jrl.device.sharding import per_shard
from jrl.models.attention.kernels import cache_block
from jrl.models.attention.reference import pad_to
from jrl.models.kernel_ops import product
from jrl.types import Array

MASKED_SCORE = float(jnp.finfo(jnp.float32).min)
NO_COLUMN = -(2**30)  # column of another head's keys, which no query sees


def attend(
    q: Array,
    k: Array,
    v: Array,
    layer: Array | None,
    first: Array,
    last: Array,
    *,
    scale: float | None = None,
    cap: float | None = None,
    sinks: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Returns the result of `attend_cached` if a row sees columns `first` to `last`, to rounding, [B, 1, H, K].

    Args:
      q: [B, 1, H, K] bfloat16 or float32.
      k, v: [B, J, M, F], in q's dtype. J divides H, `kernels.LANES` divides M, and F is K, or K padded with zeros to a
        multiple of LANES. Or [layers, B, J, M, F], of which `layer`, [] int32, is read in place. On a device J should
        be 1, 2, 4 or a multiple of 8, or XLA moves the whole cache before it is read.
      first, last: [B] int32, 0 <= first <= last < M.
      scale, cap, sinks: as in the reference.
      interpret: runs the kernel in interpret mode, on any device. For tests.
    """
    if layer is None:
        k, v, layer = jnp.expand_dims(k, 0), jnp.expand_dims(v, 0), jnp.int32(0)
    cache = (None, "batch", "kv_heads", None, None)
    query, row = ("batch", None, "heads", None), ("batch",)
    head_dim = q.shape[3]
    wide = pad_to(q, -1, k.shape[-1])
    shard = functools.partial(
        _attend_shard, scale=head_dim**-0.5 if scale is None else scale, cap=cap, interpret=interpret
    )
    arrays, axes = (layer, first, last, wide, k, v), ((), row, row, query, cache, cache)
    if sinks is not None:
        arrays, axes = (*arrays, sinks), (*axes, ("heads",))
    # The kernel's output type does not say which mesh axes it varies over.
    return per_shard(shard, arrays, axes, (query,), checked=False)[0][..., :head_dim]


def _attend_shard(
    layer: Array, first: Array, last: Array, q: Array, k: Array, v: Array, sinks: Array | None = None, *,
    scale: float, cap: float | None, interpret: bool,
) -> tuple[Array]:  # fmt: skip
    """Returns attention of the rows and heads of one device."""
    (batch, _, heads, head_dim), (kv_heads, columns) = q.shape, k.shape[2:4]
    block = cache_block(columns, kv_heads * head_dim * k.dtype.itemsize)
    entries = block * kv_heads
    # A token's heads become adjacent. XLA lays out a cache that tokens are written to in this order: nothing is moved.
    k, v = (x.swapaxes(2, 3).reshape(*x.shape[:2], columns * kv_heads, head_dim) for x in (k, v))
    entry, head = np.arange(entries), np.arange(heads)[:, None] // (heads // kv_heads)
    column = np.where(entry % kv_heads == head, entry // kv_heads, NO_COLUMN).astype(np.int32)

    def place(row: Array, step: Array, layer: Any, first: Any, last: Any) -> tuple[Any, ...]:
        """Returns the index of the block that a row reads at `step`. After the row's last block it does not change, and
        nothing is fetched."""
        at = jnp.minimum(jax.lax.div(first[row], block) + step, jax.lax.div(last[row], block))
        return layer[0], row, at, 0

    of_row = pl.BlockSpec((None, heads, head_dim), lambda row, step, *_: (row, 0, 0))
    of_cache = pl.BlockSpec((None, None, entries, head_dim), place)
    same = lambda shape: pl.BlockSpec(shape, lambda row, step, *_: (0, 0))
    of_sinks = [] if sinks is None else [(sinks.astype(jnp.float32)[:, None], same((heads, 1)))]
    most = (last // block - first // block).max() + 1
    run = pl.pallas_call(
        functools.partial(_kernel, block=block, scale=scale, cap=cap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, most),
            in_specs=[of_row, of_cache, of_cache, *(where for _, where in of_sinks), same((heads, entries))],
            out_specs=of_row,
            scratch_shapes=[pltpu.VMEM((heads, size), jnp.float32) for size in (1, 1, head_dim)],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, heads, head_dim), q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="ragged_attention",
    )
    out = run(layer[None], first, last, q[:, 0], k, v, *(x for x, _ in of_sinks), column)
    return (out[:, None],)


# Pallas fixes the signature: one ref per prefetched scalar, input, output and scratch buffer, in this order.
def _kernel(
    layer: Any, first: Any, last: Any, q: Any, k: Any, v: Any, *rest: Any, block: int, scale: float, cap: float | None,
) -> None:  # fmt: skip
    """Adds one block of columns to a row's running softmax: the highest score, the sum of exp(score - top), and the sum
    of the values with these weights.

    Every query is multiplied with the keys of all heads, m J of them, and those of other heads are masked: the matrix
    unit has to read all keys in any case, and has room for a few queries.

    Args:
      q: [H, K]. k, v: [m J, K].
      rest: sinks [H, 1] where there are any; column [H, m J] int32; out [H, K]; top, weight [H, 1]; value [H, K]
        float32.
    """
    *sinks, column, out, top, weight, value = rest
    row, step = pl.program_id(0), pl.program_id(1)
    low, high = first[row], last[row]
    at, end = jax.lax.div(low, block) + step, jax.lax.div(high, block)

    @pl.when(step == 0)
    def begin() -> None:
        # Starts from the sink, a score without a value; without sinks, from a score whose weight becomes exactly 0.
        top[...] = sinks[0][...] if sinks else jnp.full_like(top, MASKED_SCORE)
        weight[...] = jnp.ones_like(weight)
        value[...] = jnp.zeros_like(value)

    @pl.when(at <= end)
    def add() -> None:
        scores = product(q[...], k[...], inputs=1) * scale
        if cap is not None:
            scores = cap * jnp.tanh(scores / cap)
        seen_at = at * block + column[...]
        seen = (seen_at >= low) & (seen_at <= high)
        scores = jnp.where(seen, scores, MASKED_SCORE)
        highest = jnp.maximum(top[...], scores.max(axis=1, keepdims=True))
        share = jnp.exp(top[...] - highest)
        weights = jnp.where(seen, jnp.exp(scores - highest), 0.0)
        top[...] = highest
        weight[...] = weight[...] * share + weights.sum(axis=1, keepdims=True)
        value[...] = value[...] * share + _weighted(weights, v[...])

    @pl.when(at == end)
    def finish() -> None:
        out[...] = (value[...] / weight[...]).astype(out.dtype)


def _weighted(weights: Array, v: Array) -> Array:
    """Returns float32 weights [H, n] times values [n, K], [H, K] float32. For bfloat16 values a weight is split into
    two bfloat16 numbers, which hold 16 of its bits: as one, the matrix unit would round it to 8."""
    if v.dtype == jnp.float32:
        return product(weights, v)
    bits = jax.lax.bitcast_convert_type(weights, jnp.int32)
    upper = jax.lax.bitcast_convert_type(bits & jnp.int32(-(2**16)), jnp.float32)  # rounded toward 0, exactly
    both = jnp.concatenate([upper, weights - upper]).astype(v.dtype)
    out = product(both, v)
    return out[: len(weights)] + out[len(weights) :]
