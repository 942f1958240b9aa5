"""Differences of log-probs, and their exponentials, made safe: the one place where log-ratios are clamped."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array

CLAMP = 20.0  # nats; exp(20) = 4.9e8 and its square still fits float32


def log_ratio(logprobs: Array, other_logprobs: Array, mask: Array) -> Array:
    """Returns logprobs - other_logprobs, 0 where masked. Not clamped.

    Args:
      logprobs, other_logprobs: [...] float; what is masked may be NaN. mask: same shape, bool.

    Returns:
      [...] float32 or wider.
    """
    return reduce.masked(logprobs, mask) - reduce.masked(other_logprobs, mask)


def clamp(value: Array) -> Array:
    """Returns `value` clamped to [-20, 20] before exp (E9); no gradient where it is clamped.

    verl, Tunix and OpenRLHF clamp likewise; TRL and AReaL do not.
    """
    # where, not clip: at the bound itself the derivative of clip is one half.
    return jnp.where(jnp.abs(value) > CLAMP, jnp.sign(value) * CLAMP, value)


def clamped(value: Array) -> Array:
    """Returns where `clamp` changed the value, bool, counted by E9."""
    return jnp.abs(value) > CLAMP


def ratio(logprobs: Array, old_logprobs: Array, mask: Array) -> Array:
    """Returns exp(clamp(logprobs - sg(old_logprobs))), 1 where masked, [...] float32 or wider.

    Args:
      logprobs: [...] float, differentiated. old_logprobs: same shape, never differentiated (E7). mask: same, bool.
    """
    return jnp.exp(clamp(log_ratio(logprobs, jax.lax.stop_gradient(old_logprobs), mask)))
