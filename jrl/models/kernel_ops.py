"""What our kernels for TPUs compute inside: a norm, and a product with its sums in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.types import Array


def normed(x: Array, scale: Array, eps: float, plus_one: bool) -> Array:
    """Returns `norm.rms_norm` of rows [B, D], as x; inside a kernel."""
    wide, scale = x.astype(jnp.float32), scale.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * (1 + scale if plus_one else scale)).astype(x.dtype)


def product(x: Array, y: Array, inputs: int = 0) -> Array:
    """Returns x y summed into float32, inside a kernel: of bfloat16 in one pass, of float32 in as many as it needs.

    Args:
      inputs: the axis of y that is summed over.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        x, y, (((1,), (inputs,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
