"""Attention as written: einsum, mask, softmax in float32 or wider. The reference for every kernel.

`jax.nn.dot_product_attention` casts to float32 even in float64, where the formula tests live, so it is not used.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.sharding import reshape
from jrl.types import Array


def rotate(x: Array, positions: Array, theta: float) -> Array:
    """Returns `x` with rotary position embedding.

    Args:
      x: [B, L, H, K], K even; the two halves of K are the real and imaginary parts.
      positions: [B, L] int32.
      theta: base of the wavelengths.

    Source: RoFormer (2104.09864), in the half-split form that published Llama weights use.
    """
    half = x.shape[-1] // 2
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequency = jnp.asarray(theta, wide) ** (-jnp.arange(half, dtype=wide) / half)
    angle = positions[:, :, None, None].astype(wide) * frequency[None, None, None, :]
    real, imaginary = jnp.split(x.astype(wide), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([real * cos - imaginary * sin, imaginary * cos + real * sin], axis=-1).astype(x.dtype)


def attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Returns softmax(q k / sqrt(K)) v over the positions that `mask` allows, [B, Q, H, K].

    Args:
      q: [B, Q, H, K]. k, v: [B, J, M, K], where J divides H: every H / J query heads share one key head.
      mask: [B, Q, M] bool. Every query must be allowed at least one position.
    """
    batch, queries, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = (batch, queries, kv_heads, heads // kv_heads, head_dim)
    q = reshape(q, grouped, "batch", None, "kv_heads", None, None)
    # Widened before the products: exact, and CPU has no batched product of bfloat16 into float32.
    scores = jnp.einsum("bqjgk,bjmk->bjgqm", q.astype(wide), k.astype(wide)) * head_dim**-0.5
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("bjgqm,bjmk->bqjgk", weights, v.astype(wide))
    return reshape(out.astype(v.dtype), (batch, queries, heads, head_dim), "batch", None, "heads", None)
