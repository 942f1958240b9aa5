"""Losses of several answers to one prompt, ranked by their rewards."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def pro(mean_logprob: Array, reward: Array, mask: Array) -> Array:
    """Returns P23, PRO: contrast each answer with all worse ones, weighted by the difference in reward.

    With the answers in order of falling reward r_k, s_k = LPbar_k, T_ki = r_k - r_i, T_k = max_i T_ki over i below k:

        sum over k of -log( exp(s_k T_k) / (exp(s_k T_k) + sum over i below k of exp(s_i T_ki)) )

    Answers of equal reward are not compared (T = 0).

    Args:
      mean_logprob: [..., n] float, differentiated. reward: [..., n] float. mask: [..., n] bool; masked entries may be
        NaN. The answers may be in any order.

    Returns:
      [...] float.

    Source: Song et al. 2306.17492 eq. 7, as released: the temperature of the best is the largest difference.
    """
    s, r = reduce.masked(mean_logprob, mask), reduce.masked(reward, mask)
    gap = r[..., :, None] - r[..., None, :]  # [..., k, i], T_ki
    below = mask[..., :, None] & mask[..., None, :] & (gap > 0)
    gap = jnp.where(below, gap, 0)
    top = jnp.max(gap, axis=-1, initial=0)
    own = s * top
    others = jnp.where(below, s[..., None, :] * gap, -jnp.inf)
    total = jax.nn.logsumexp(jnp.concatenate([own[..., None], others], axis=-1), axis=-1)
    return jnp.sum(jnp.where(jnp.any(below, axis=-1), total - own, 0), axis=-1)


def rrhf(mean_logprob: Array, reward: Array, mask: Array) -> Array:
    """Returns P23, RRHF's ranking term: sum over pairs r_i < r_j of max(0, LPbar_i - LPbar_j).

    Args, returns: as `pro`.

    Source: Yuan et al. 2304.05302 eq. 2; the paper adds the NLL of the best answer.
    """
    s, r = reduce.masked(mean_logprob, mask), reduce.masked(reward, mask)
    worse = mask[..., :, None] & mask[..., None, :] & (r[..., :, None] < r[..., None, :])
    return jnp.sum(jnp.where(worse, jax.nn.relu(s[..., :, None] - s[..., None, :]), 0), axis=(-2, -1))
