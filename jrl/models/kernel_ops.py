"""Operations inside our TPU kernels: a norm, and a product accumulated in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.types import Array


def normed(x: Array, scale: Array, eps: float, plus_one: bool) -> Array:
    """Returns `norm.rms_norm` of rows [B, D], in x's dtype, inside a kernel."""
    wide, scale = x.astype(jnp.float32), scale.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * (1 + scale if plus_one else scale)).astype(x.dtype)


def product(x: Array, y: Array, inputs: int = 0) -> Array:
    """Returns x y accumulated in float32, inside a kernel: one pass for bfloat16, which is exact and all that the
    kernel's compiler accepts; as many as needed for float32. A run's default precision is "highest".

    Args:
      inputs: the axis of y that is summed over.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        x, y, (((1,), (inputs,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
