"""Attention by cuDNN's fused GPU kernel, which stores no scores, through JAX. The reference is `attention.attend`.
So far it is lowered for GPUs and tested with implementation='xla'; no GPU has run it.

Source: jax.nn.dot_product_attention; the running softmax is that of FlashAttention (2205.14135).
"""

from __future__ import annotations

from typing import Literal

import jax

from jrl.device.sharding import per_shard
from jrl.models.attention.reference import pad_to
from jrl.types import Array


def attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    *,
    scale: float | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Array:
    """Returns the result of `attention.attend`, to rounding, [B, L, H, K].

    Args:
      q: [B, L, H, K] bfloat16, K a multiple of 8 and at most 128, 256 from Hopper on. k, v: [B, J, M, K], where J
        divides H.
      mask: [B, L, M] bool. Every query must be allowed at least one position.
      scale: as in the reference.
      implementation: 'xla' computes the same result in any dtype, on any device. For tests.

    Raises: RuntimeError without cuDNN; NotImplementedError for heads of another size.
    """

    def shard(q: Array, k: Array, v: Array, mask: Array) -> tuple[Array]:
        length = q.shape[1]
        q, k, v = _even(q, 1), _even(k.swapaxes(1, 2), 1), _even(v.swapaxes(1, 2), 1)
        mask = _even(_even(mask, 1), 2)[:, None]
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, implementation=implementation)
        return (out[:, :length],)

    rows, keys = ("batch", None, "heads", None), ("batch", "kv_heads", None, None)
    # The kernel's output type does not say which mesh axes it varies over.
    return per_shard(shard, (q, k, v, mask), (rows, keys, keys, ("batch", None, None)), (rows,), checked=False)[0]


def _even(x: Array, axis: int) -> Array:
    """Returns `x` padded to an even length along `axis`, which the gradient with a mask needs. No token sees the
    padding, and its own result is dropped."""
    return pad_to(x, axis, x.shape[axis] + x.shape[axis] % 2)
