"""Norms, computed in float32 or wider."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.models.remat import mean_square
from jrl.types import Array


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Returns x / sqrt(mean(x^2) + eps) * scale over as many last axes as `scale` has, computed in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    over = tuple(range(-scale.ndim, 0))
    mean = mean_square(jnp.mean(wide * wide, axis=over, keepdims=True), x.dtype)
    normed = wide * jax.lax.rsqrt(mean + eps)
    return (normed * jnp.expand_dims(scale, tuple(range(x.ndim - scale.ndim))).astype(wide.dtype)).astype(x.dtype)


def layer_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    """Returns (x - mean) / sqrt(variance + eps) * scale + bias over the last axis, computed in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centered * jax.lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + eps)
    scale, bias = (w.reshape((1,) * (x.ndim - 1) + (-1,)).astype(wide.dtype) for w in (scale, bias))
    return (normed * scale + bias).astype(x.dtype)
