"""Which tokens make the entropy fall: those whose log-prob and advantage are high together (Clip-Cov, KL-Cov).

Means, shares and ranks are over all arrays given, so give them a whole optimizer step. Selections carry no gradient.

Source of all: Cui et al. 2505.22617; verl computes them by micro-batch and takes at least one token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import order_statistics, ratios, reduce

Array = jax.Array


def covariance(logprobs: Array, advantages: Array, mask: Array) -> Array:
    """Returns L20's cov_t = (A_t - mean A) * (logprobs_t - mean logprobs), means over the mask, 0 elsewhere.

    Exactly 0 where all advantages, or all log-probs, of the mask are equal.

    Args:
      logprobs, advantages: [...] float; masked entries may be NaN. mask: same shape, bool.

    Returns:
      [...] float32 or wider, without gradient.
    """
    return _centered(jax.lax.stop_gradient(advantages), mask) * _centered(jax.lax.stop_gradient(logprobs), mask)


def clip_cov(
    logprobs: Array, advantages: Array, mask: Array, noise: Array, *, share: float, low: float, high: float
) -> Array:
    """Returns the tokens that Clip-Cov (L20) takes out of the policy loss, [...] bool: of those with
    low < cov < high, as many as floor(share * tokens), those with the largest noise; all of them if they are fewer.

    Args:
      logprobs, advantages, mask: as in `covariance`. noise: same shape, uint32, by the name of a token.
      share: of the tokens of the mask, 2e-4 there. low, high: 1 and 5 there.
    """
    cov = covariance(logprobs, advantages, mask)
    within = mask & (cov > low) & (cov < high)
    return order_statistics.largest(noise, within, order_statistics.share_of(mask, share))


def kl_cov(logprobs: Array, advantages: Array, mask: Array, *, share: float) -> Array:
    """Returns the tokens that KL-Cov (L20) penalizes, [...] bool: the floor(share * tokens) with the largest cov, and
    any that tie with the last of them. None where every cov is 0.

    Arguments as `clip_cov`.
    """
    cov = covariance(logprobs, advantages, mask)
    count = order_statistics.share_of(mask, share)
    return order_statistics.largest(order_statistics.order_keys(cov), mask, count) & jnp.any(cov != 0)


def kl_cov_loss(
    logprobs: Array, old_logprobs: Array, advantages: Array, selected: Array, mask: Array, *, coefficient: float
) -> Array:
    """Returns L20's loss with KL-Cov: -rho * A, plus coefficient * |logprobs - old_logprobs| on selected tokens.

    There is no clip. On a token that has not moved the penalty has no gradient: it acts from the second update of a
    batch on.

    Args:
      logprobs: [...] float, differentiated. old_logprobs, advantages: same shape, fixed. selected, mask: same, bool.

    Returns:
      [...] float32 or wider, 0 where masked.
    """
    advantages = reduce.masked(jax.lax.stop_gradient(advantages), mask)
    moved = ratios.log_ratio(logprobs, jax.lax.stop_gradient(old_logprobs), mask)
    # sign, not abs: its gradient at 0 is 0.
    distance = jax.lax.stop_gradient(jnp.sign(moved)) * moved
    return -jnp.exp(ratios.clamp(moved)) * advantages + coefficient * jnp.where(selected, distance, 0)


def _centered(x: Array, mask: Array) -> Array:
    """Returns x - mean over the mask, 0 elsewhere, and 0 throughout where all are equal (compared, as in E1)."""
    x = reduce.masked(x, mask)
    varied = jnp.max(jnp.where(mask, x, -jnp.inf)) > jnp.min(jnp.where(mask, x, jnp.inf))
    return jnp.where(mask & varied, x - reduce.masked_mean(x, mask), 0)
