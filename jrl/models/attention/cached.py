"""Attention of one new token per row over a cache in blocks of columns. A block that no row sees is not read, so the
cost of a decode step depends on the filled columns and not on the allocated ones.

A block contributes its highest score, the sum of the exponentials of its scores and the weighted sum of its values;
contributions are added left to right, each rescaled to the highest score so far (Milakov and Gimelshein 2018,
1805.02867). Columns that a row does not see add exact zeros: its result does not depend on the lengths of other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.device.sharding import reshape
from jrl.ops.members import any_member
from jrl.types import Array

# Columns of the first block, and of the second; each further one is as wide as all before it. A CPU sums products over
# at most 64 columns twice as fast as over more.
FIRST = 64


class PartialSoftmax(NamedTuple):
    """The contribution of some columns, before the division. B rows, J key heads, G query heads per key head."""

    top: Array  # [B, J, G], the highest score
    weight: Array  # [B, J, G], sum of exp(score - top)
    value: Array  # [B, J, G, K], sum of exp(score - top) v


def edges(columns: int) -> tuple[int, ...]:
    """Returns where each block of `columns` columns ends: 64, 128, 256, 512 and so on, the last one shortened."""
    ends = [FIRST]
    while ends[-1] < columns:
        ends.append(2 * ends[-1])
    return (*ends[:-1], columns)


def attend_cached(
    q: Array,
    k: tuple[Array, ...],
    v: tuple[Array, ...],
    layer: Array | None,
    mask: Array,
    *,
    transposed: bool = False,
    scale: float | None = None,
    cap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Returns the result of `attention.attend` for one query a row, [B, 1, H, K], to rounding.

    Args:
      q: [B, 1, H, K].
      k, v: blocks [B, J, m, K] of M columns in all, where J divides H; or [layers, B, J, m, K], of which `layer` is
        read. It is sliced where it is used; sliced earlier, unused blocks would be copied too.
      transposed: keys are [B, J, K, m]. A CPU then sums over many columns at once instead of one.
      mask: [B, 1, M] bool. Every query must be allowed at least one position.
      scale, cap, sinks: as in `attend`.
    """
    batch, _, heads, head_dim = q.shape
    kv_heads = v[0].shape[-3]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scale = head_dim**-0.5 if scale is None else scale
    grouped = (batch, kv_heads, heads // kv_heads, head_dim)
    q = reshape(q, grouped, "batch", "kv_heads", None, None).astype(wide)
    # On a CPU a matmul with a few queries repacks all keys, and explicit sums are three times as fast. With one query
    # it does not repack.
    on_cpu = (_scores, _values) if heads == kv_heads else (_scores_by_sums, _values_by_sums)
    scores_of = _scores
    if transposed:
        on_cpu, scores_of = (_transposed_scores_by_sums, _values_by_sums), _transposed_scores

    def sums(q: Array, k: Array, v: Array, mask: Array) -> PartialSoftmax:
        k, v = (x if layer is None else jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (k, v))
        allowed = mask[:, None, None]
        scores = jax.lax.platform_dependent(q, k.astype(wide), cpu=on_cpu[0], default=scores_of) * scale
        if cap is not None:
            scores = cap * jnp.tanh(scores / cap)
        scores = jnp.where(allowed, scores, jnp.finfo(wide).min)
        top = scores.max(axis=-1)
        weights = jnp.where(allowed, jnp.exp(scores - top[..., None]), 0)
        value = jax.lax.platform_dependent(weights, v.astype(wide), cpu=on_cpu[1], default=_values)
        return PartialSoftmax(top, weights.sum(axis=-1), value)

    def add(total: PartialSoftmax, *block: Array) -> PartialSoftmax:
        new = sums(*block)
        top = jnp.maximum(total.top, new.top)
        old_share, new_share = jnp.exp(total.top - top), jnp.exp(new.top - top)
        return PartialSoftmax(
            top,
            total.weight * old_share + new.weight * new_share,
            total.value * old_share[..., None] + new.value * new_share[..., None],
        )

    total, start = None, 0
    for k_block, v_block in zip(k, v, strict=True):
        seen = mask[:, 0, start : start + v_block.shape[-2]]
        start += v_block.shape[-2]
        block = (q, k_block, v_block, seen)
        if total is None:
            total = sums(*block)
        else:
            total = jax.lax.cond(any_member(seen.any()), add, lambda total, *_: total, total, *block)
    if sinks is not None:  # one more score, with a weight and no value
        sink = reshape(sinks.astype(wide), grouped[1:3], "kv_heads", None)[None]
        total = _add_sink(total, sink)
    out = (total.value / total.weight[..., None]).astype(v[0].dtype)
    return reshape(out, (batch, 1, heads, head_dim), "batch", None, "heads", None)


def _add_sink(total: PartialSoftmax, sink: Array) -> PartialSoftmax:
    """Returns `total` with one more score, [1, J, G], that has no value."""
    top = jnp.maximum(total.top, sink)
    share = jnp.exp(total.top - top)
    return PartialSoftmax(top, total.weight * share + jnp.exp(sink - top), total.value * share[..., None])


def _scores(q: Array, k: Array) -> Array:
    return jnp.einsum("bjgk,bjmk->bjgm", q, k)


def _transposed_scores(q: Array, k: Array) -> Array:
    return jnp.einsum("bjgk,bjkm->bjgm", q, k)


def _transposed_scores_by_sums(q: Array, k: Array) -> Array:
    return (q[..., None] * k[:, :, None]).sum(axis=3)


def _values(weights: Array, v: Array) -> Array:
    return jnp.einsum("bjgm,bjmk->bjgk", weights, v)


def _scores_by_sums(q: Array, k: Array) -> Array:
    return (q[:, :, :, None] * k[:, :, None]).sum(axis=-1)


def _values_by_sums(weights: Array, v: Array) -> Array:
    # A barrier: fused into the next product, this would be computed again for each column.
    return jax.lax.optimization_barrier((weights[..., None] * v[:, :, None]).sum(axis=3))
