"""Token rewards out of a model's own contrast, and DPO with them as a regularizer (T-REG)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import ratios, reduce

Array = jax.Array


def contrastive_token_reward(better: Array, worse: Array, mask: Array) -> Array:
    """Returns P25's r_t = sigmoid(lp_better_t - lp_worse_t) - 1/2, [..., T] float32 or wider, 0 where masked.

    Args:
      better, worse: [..., T] float, log-probs of an answer's tokens under one model, asked for a good and for a bad
        answer; the log-ratio is clamped (E9).
      mask: [..., T] bool, tokens of the answer; False where one of the two prompts did not fit.

    Source: T-REG, Zhou et al. 2412.02685.
    """
    contrast = ratios.clamp(ratios.log_ratio(better, worse, mask))
    return jax.lax.stop_gradient(reduce.masked(jax.nn.sigmoid(contrast) - 0.5, mask))


def token_regularizer(logprobs: Array, token_reward: Array, mask: Array, *, beta: Array | float) -> Array:
    """Returns P25's REG(y) = -sum_t beta r_t lp_t of an answer, [...] float32 or wider. No gradient passes r."""
    reward = jax.lax.stop_gradient(reduce.masked(token_reward, mask))
    return -beta * jnp.sum(reward * reduce.masked(logprobs, mask), axis=-1)


def token_regularized(margin: Array, preferred: Array, other: Array, *, alpha: Array | float) -> Array:
    """Returns P25, -log sigmoid(m) + alpha sg(sigmoid(-m)) (REG(y_w) + REG(y_l)), of a pair, [...].

    Args:
      margin: [...] float, m = beta * D. preferred, other: [...] float, REG of both answers.

    Source: T-REG, Zhou et al. 2412.02685, where the regularizer fades as a pair is told apart.
    """
    fading = jax.lax.stop_gradient(jax.nn.sigmoid(-margin))
    return jax.nn.softplus(-margin) + alpha * fading * (preferred + other)
