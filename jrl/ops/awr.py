"""Advantage-weighted regression: likelihood with weights that grow exponentially with the advantage."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def awr(logprobs: Array, advantages: Array, mask: Array, *, beta: float, max_weight: float) -> Array:
    """Returns L16: -min(exp(A / beta), max_weight) * logprobs, with no gradient through the weight.

    An advantage of 0 has weight 1: this is imitation, not a policy gradient. The scale of beta is that of the
    advantages, so normalize them first.

    Args:
      logprobs: [...] float, differentiated. advantages: same shape, fixed. mask: same shape, bool.
      beta: above 0, in units of the advantage. max_weight: at least 1.

    Returns:
      [...] float32 or wider, 0 where masked.

    Source: Peng et al. 1910.00177; beta 1, weights up to 20.
    """
    advantages = reduce.masked(jax.lax.stop_gradient(advantages), mask)
    return -awr_weights(advantages, beta=beta, max_weight=max_weight) * reduce.masked(logprobs, mask)


def awr_weights(advantages: Array, *, beta: float, max_weight: float) -> Array:
    """Returns the weights of L16, min(exp(A / beta), max_weight), [...] as `advantages`."""
    # The minimum before exp: exp of a large advantage is not finite.
    return jnp.exp(jnp.minimum(advantages / beta, jnp.log(max_weight)))
