"""Reward models for different kinds of users: a latent variable inferred from a user's comparisons (VPL)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import reduce

Array = jax.Array
NODES, WEIGHTS = np.polynomial.hermite.hermgauss(20)  # of integrals with exp(-x^2)


def latent_kl(mean: Array, log_std: Array) -> Array:
    """Returns P36's KL(N(mu, sigma^2) || N(0, 1)) = sum_d (mu^2 + sigma^2 - 1 - log sigma^2) / 2, [...].

    Args:
      mean, log_std: [..., D] float, of the encoder's distribution over a user's latent variable.

    Source: VPL, Poddar et al. 2408.10075 eq. 3.
    """
    mean, log_std = reduce.widen(mean), reduce.widen(log_std)
    return 0.5 * jnp.sum(mean**2 + jnp.exp(2 * log_std) - 1 - 2 * log_std, axis=-1)


def draw_latent(mean: Array, log_std: Array, noise: Array, known: Array) -> Array:
    """Returns P36's z = mu + sigma * noise, [..., D]; 0, the prior's mean, for a user without comparisons.

    Args:
      noise: [..., D] float, standard normal. known: [...] bool, the user has comparisons; where False, the encoder's
        outputs are unused.
    """
    known = jnp.broadcast_to(known[..., None], mean.shape)
    clean = lambda x: reduce.masked(x, known)
    return jnp.where(known, clean(mean) + jnp.exp(clean(log_std)) * noise, 0)


def latent_preference(score: Array, other_score: Array, kl: Array, *, weight: Array | float) -> Array:
    """Returns P36's loss of a pair, -log sigmoid(r(y_w, z) - r(y_l, z)) + weight * KL, [...].

    Args:
      score, other_score: [...] float, of the preferred answer and the other one, given z. kl: [...] float, of its user.

    Source: VPL, Poddar et al. 2408.10075 eq. 3.
    """
    return jax.nn.softplus(reduce.widen(other_score) - score) + weight * kl


def expected_latent_preference(mean: Array, variance: Array, kl: Array, *, weight: Array | float) -> Array:
    """Returns the mean of P36's loss over z if the difference of a pair's rewards is linear in z,
    E[-log sigmoid(d)] + weight * KL with d ~ N(mean, variance), [...], by Gauss-Hermite quadrature with 20 nodes.

    Args:
      mean, variance: [...] float, variance at least 0. kl: [...] float, of the pair's user.

    Source: VPL, Poddar et al. 2408.10075 eq. 3, which draws one z for every pair instead.
    """
    mean, variance = reduce.widen(mean), reduce.widen(variance)
    some = variance > 0
    deviation = jnp.where(some, jnp.sqrt(jnp.where(some, variance, 1)), 0)  # the slope of sqrt at 0 is infinite
    nodes, weights = (jnp.asarray(x, mean.dtype) for x in (math.sqrt(2) * NODES, WEIGHTS / math.sqrt(math.pi)))
    along = (1,) * mean.ndim + (-1,)
    score = mean[..., None] + deviation[..., None] * nodes.reshape(along)
    loss = latent_preference(score, jnp.zeros_like(score), jnp.zeros_like(score), weight=0.0)
    return jnp.sum(loss * weights.reshape(along), axis=-1) + weight * kl


def win_scaled(score: Array, mask: Array) -> Array:
    """Returns P36's scaled rewards of one user, mean_j sigmoid(r_i - r_j) over the answers in the mask, [..., K]: the
    probability of being preferred, which does not depend on the scale of the user's rewards; 0 where masked.

    Source: VPL's scaling by pairwise classification, Poddar et al. 2408.10075 section 4.2.
    """
    clean = reduce.masked(score, mask)
    wins = jax.nn.sigmoid(clean[..., :, None] - clean[..., None, :]) * mask[..., None, :]
    return jnp.where(mask, wins.sum(-1) / jnp.maximum(mask.sum(-1, keepdims=True), 1), 0)
