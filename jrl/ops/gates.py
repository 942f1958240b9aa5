"""Soft gates that replace PPO's clip."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import ratios, reduce

Array = jax.Array


def soft_gated(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    *,
    positive_temperature: float,
    negative_temperature: float,
) -> Array:
    """Returns L18, SAPO: -f(rho) * A, f(rho) = 4 / tau * sigmoid(tau * (rho - 1)).

    tau is `positive_temperature` where A > 0 and `negative_temperature` elsewhere. f'(1) = 1, so on policy the gradient
    is the policy gradient; away from 1 the gate closes smoothly on both sides, and no dual clip is needed.

    Args:
      logprobs: [...] float, differentiated. old_logprobs, advantages: same shape, fixed. mask: same shape, bool.
      positive_temperature, negative_temperature: above 0.

    Returns:
      [...] float32 or wider, 0 where masked.

    Source: SAPO, Gao et al. 2511.20347, as in verl: temperatures 1.0 and 1.05.
    """
    advantages = reduce.masked(jax.lax.stop_gradient(advantages), mask)
    tau = jnp.where(advantages > 0, positive_temperature, negative_temperature)
    rho = ratios.ratio(logprobs, old_logprobs, mask)
    return -4 / tau * jax.nn.sigmoid(tau * (rho - 1)) * advantages
