"""Which tokens make the entropy fall: those whose log-prob and advantage are high together (Clip-Cov, KL-Cov).

Means, shares and ranks are over the whole arrays, so pass a whole optimizer step. Selections carry no gradient.

Source: Cui et al. 2505.22617; verl computes them per micro-batch and takes at least one token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import order_statistics, ratios, reduce

Array = jax.Array


def covariance(logprobs: Array, advantages: Array, mask: Array) -> Array:
    """Returns L20's cov_t = (A_t - mean A) * (logprobs_t - mean logprobs), means over the mask, 0 elsewhere.

    Exactly 0 if all advantages, or all log-probs, in the mask are equal.

    Args:
      logprobs, advantages: [...] float; masked entries may be NaN. mask: same shape, bool.

    Returns:
      [...] float32 or wider, without gradient.
    """
    return _centered(jax.lax.stop_gradient(advantages), mask) * _centered(jax.lax.stop_gradient(logprobs), mask)


def clip_cov(
    logprobs: Array, advantages: Array, mask: Array, noise: Array, *, share: float, low: float, high: float
) -> Array:
    """Returns the tokens that Clip-Cov (L20) drops from the policy loss, [...] bool: among those with low < cov < high,
    the floor(share * tokens) with the largest noise, or all if there are fewer.

    Args:
      logprobs, advantages, mask: as in `covariance`. noise: same shape, uint32, a function of the token's identity.
      share: of the tokens in the mask, 2e-4 in the paper. low, high: 1 and 5 in the paper.
    """
    cov = covariance(logprobs, advantages, mask)
    within = mask & (cov > low) & (cov < high)
    return order_statistics.largest(noise, within, order_statistics.share_of(mask, share))


def kl_cov(logprobs: Array, advantages: Array, mask: Array, *, share: float) -> Array:
    """Returns the tokens that KL-Cov (L20) penalizes, [...] bool: the floor(share * tokens) with the largest cov, plus
    ties with the last of them. None if every cov is 0.

    Arguments as in `clip_cov`.
    """
    cov = covariance(logprobs, advantages, mask)
    count = order_statistics.share_of(mask, share)
    return order_statistics.largest(order_statistics.order_keys(cov), mask, count) & jnp.any(cov != 0)


def kl_cov_loss(
    logprobs: Array, old_logprobs: Array, advantages: Array, selected: Array, mask: Array, *, coefficient: float
) -> Array:
    """Returns L20's loss with KL-Cov: -rho * A, plus coefficient * |logprobs - old_logprobs| on selected tokens.

    There is no clip. The penalty has no gradient on a token that has not moved, so it acts from the second update of a
    batch on.

    Args:
      logprobs: [...] float, differentiated. old_logprobs, advantages: same shape, fixed. selected, mask: same, bool.

    Returns:
      [...] float32 or wider, 0 where masked.
    """
    advantages = reduce.masked(jax.lax.stop_gradient(advantages), mask)
    moved = ratios.log_ratio(logprobs, jax.lax.stop_gradient(old_logprobs), mask)
    distance = jnp.sign(moved) * moved  # not abs: its gradient at 0 is 1
    return -jnp.exp(ratios.clamp(moved)) * advantages + coefficient * jnp.where(selected, distance, 0)


def _centered(x: Array, mask: Array) -> Array:
    """Returns x - mean over the mask, 0 elsewhere; all 0 if the masked values are equal (by comparison, as in E1)."""
    x = reduce.masked(x, mask)
    varied = jnp.max(jnp.where(mask, x, -jnp.inf)) > jnp.min(jnp.where(mask, x, jnp.inf))
    return jnp.where(mask & varied, x - reduce.masked_mean(x, mask), 0)
