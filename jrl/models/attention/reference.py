"""Reference attention: einsum, mask, softmax in float32 or wider. Every kernel is tested against it.

`jax.nn.dot_product_attention` casts to float32 even in float64, where the formula tests live, so it is not used.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrl.device.sharding import reshape
from jrl.types import Array

Rows = Callable[[Array], Array]  # [B, Q, ...] -> the rows of some queries, [B, block, ...]


def attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | Callable[[Rows], Array],
    *,
    scale: float | None = None,
    cap: float | None = None,
    sinks: Array | None = None,
    block: int | None = None,
) -> Array:
    """Returns softmax(q k scale) v over the positions that `mask` allows, [B, Q, H, K].

    Args:
      q: [B, Q, H, K]. k, v: [B, J, M, K], where J divides H: H / J query heads share one key head.
      mask: [B, Q, M] bool. Every query must be allowed at least one position. Or a function that returns the
        requested rows of it, [B, block, M]: with `block`, no [B, Q, M] array exists then.
      scale: None: 1 / sqrt(K).
      cap: scores x become cap * tanh(x / cap), as in Gemma 2 (2408.00118, section 2); None: no cap.
      sinks: [H], one more logit for each head: it takes a share of the softmax and has no value, as in gpt-oss
        (2508.10925; 2309.17453). None: no sink.
      block: queries whose scores [B, H, block, M] exist at once; the backward pass recomputes them. None: all.
    """
    batch, queries, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = (batch, queries, kv_heads, heads // kv_heads, head_dim)
    q = reshape(q, grouped, "batch", None, "kv_heads", None, None)
    scale = head_dim**-0.5 if scale is None else scale

    def attend_block(q: Array, mask: Array) -> Array:
        # Widened before the products: this is exact, and CPUs have no batched product of bfloat16 into float32.
        scores = jnp.einsum("bqjgk,bjmk->bjgqm", q.astype(wide), k.astype(wide)) * scale
        if cap is not None:
            scores = cap * jnp.tanh(scores / cap)
        scores = jnp.where(mask[:, None, None], scores, jnp.finfo(wide).min)
        if sinks is None:
            weights = jax.nn.softmax(scores, axis=-1)
        else:
            sink = reshape(sinks.astype(wide), grouped[2:4], "kv_heads", None)[None, :, :, None, None]
            weights = jnp.exp(scores - jnp.logaddexp(jax.nn.logsumexp(scores, axis=-1, keepdims=True), sink))
        return jnp.einsum("bjgqm,bjmk->bqjgk", weights, v.astype(wide)).astype(v.dtype)

    mask_of = mask if callable(mask) else lambda rows: rows(mask)
    if block is None or queries <= block:
        out = attend_block(q, mask_of(lambda x: x))
    else:
        out = _in_blocks(attend_block, q, mask_of, block)
    return reshape(out, (batch, queries, heads, head_dim), "batch", None, "heads", None)


def pad_to(x: Array, axis: int, size: int) -> Array:
    """Returns `x` padded with zeros at the end of `axis` to `size` entries."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def _in_blocks(
    attend_block: Callable[[Array, Array], Array], q: Array, mask_of: Callable[[Rows], Array], block: int
) -> Array:
    """Returns attention a block of queries at a time. The padding of the last block is removed."""
    batch, queries, kv_heads, group, head_dim = q.shape
    blocks = -(-queries // block)
    q = pad_to(q, 1, blocks * block)
    q = reshape(q, (batch, blocks, block, kv_heads, group, head_dim), "batch", None, None, "kv_heads", None, None)

    @jax.checkpoint
    def step(args: tuple[Array, Array]) -> Array:
        q, start = args
        rows = lambda x: jax.lax.dynamic_slice_in_dim(pad_to(x, 1, blocks * block), start, block, axis=1)
        return attend_block(q, mask_of(rows))

    out = jnp.moveaxis(jax.lax.map(step, (jnp.moveaxis(q, 1, 0), block * jnp.arange(blocks))), 0, 1)
    padded = (batch, blocks * block, kv_heads, group, head_dim)
    return reshape(out, padded, "batch", None, "kv_heads", None, None)[:, :queries]
