"""Trust regions that mask tokens: by the change of a token's probability (DPPO), and by the second moment of log-ratios
(M2PO). Masked tokens stay in the loss's denominator."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import order_statistics, ratios, reduce

Array = jax.Array


def dppo(logprobs: Array, behaviour_logprobs: Array, advantages: Array, mask: Array, *, delta: float) -> Array:
    """Returns L21: -sg(rho) * A * logprobs on tokens within the trust region, 0 elsewhere; no ratio is clipped.

    rho = exp(logprobs - behaviour_logprobs). A token is outside the region if its probability has already moved by more
    than `delta` in the direction of its advantage: A > 0 and p - p_behaviour > delta, or A < 0 and < -delta. A ratio is
    a poor measure for rare tokens: from 1e-5 to 3e-5 is a ratio of 3, and hardly a change.

    Args:
      logprobs: [...] float, differentiated. behaviour_logprobs, advantages: same shape, fixed. mask: same shape, bool.
      delta: in (0, 1), in probability.

    Returns:
      [...] float32 or wider, 0 where masked.

    Source: prime-rl's default loss, delta 0.2; verl.
    """
    inside = within_probability(logprobs, behaviour_logprobs, advantages, mask, delta=delta)
    rho = jax.lax.stop_gradient(ratios.ratio(logprobs, behaviour_logprobs, mask))
    advantages = reduce.masked(jax.lax.stop_gradient(advantages), inside)
    return -rho * advantages * reduce.masked(logprobs, inside)


def within_probability(
    logprobs: Array, behaviour_logprobs: Array, advantages: Array, mask: Array, *, delta: float
) -> Array:
    """Returns the tokens in the mask that L21 keeps in the loss, [...] bool. Arguments as in `dppo`."""
    new, behaviour = (jnp.exp(reduce.masked(x, mask)) for x in (logprobs, behaviour_logprobs))
    moved = new - behaviour
    outside = ((advantages > 0) & (moved > delta)) | ((advantages < 0) & (moved < -delta))
    return mask & ~outside


def within_second_moment(logprobs: Array, behaviour_logprobs: Array, mask: Array, *, limit: float) -> Array:
    """Returns L22, M2PO: the tokens left when those with the largest (logprobs - behaviour_logprobs)^2 are dropped
    until the mean of the rest is at most `limit`, [...] bool. Equal squares are dropped together.

    The mean is over the whole arrays, so pass a whole optimizer step. It may leave no token.

    Args:
      logprobs, behaviour_logprobs: [...] float; masked entries may be NaN. mask: same shape, bool.
      limit: above 0, nats squared; 0.04 in the paper.

    Source: Zheng et al. 2510.01161; AReaL, which drops one of two equal squares before the other.
    """
    square = jnp.square(ratios.log_ratio(logprobs, behaviour_logprobs, mask))
    keys = order_statistics.order_keys(square)
    return mask & (keys <= order_statistics.largest_key(_mean_within, keys, square, mask, jnp.asarray(limit)))


def _mean_within(key: Array, keys: Array, square: Array, mask: Array, limit: Array) -> Array:
    return reduce.masked_mean(square, mask & (keys <= key)) <= limit
