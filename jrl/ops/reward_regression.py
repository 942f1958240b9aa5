"""Losses of reward models that learn numbers: ratings of attributes, and whether a step of a solution is right."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def attribute_error(score: Array, rating: Array, rated: Array) -> Array:
    """Returns P3, sum_k mask_k (o_k - y_k)^2 / sum_k mask_k, [...] float32 or wider; 0 where nothing is rated.

    Args:
      score: [..., K] float, the head's outputs. rating: [..., K] float, anything where not rated.
      rated: [..., K] bool.

    Source: HelpSteer2, Wang et al. 2406.08673; ArmoRM, Wang et al. 2406.12845, for the mask.
    """
    error = reduce.masked(score, rated) - reduce.masked(rating, rated)
    return jnp.sum(error**2, axis=-1) / jnp.maximum(rated.sum(-1), 1)


def step_cross_entropy(score: Array, label: Array) -> Array:
    """Returns P4, -(y log p + (1 - y) log(1 - p)) with p = sigmoid(score), of every step, [...] float32 or wider.

    Args:
      score: [...] float, the reward head at the end of a step. label: [...] float in [0, 1], whether the solution is
        right up to there, or the share of its continuations that are.

    Source: Lightman et al. 2305.20050; soft labels: Wang et al. 2312.08935.
    """
    score, label = reduce.widen(score), reduce.widen(label)
    return label * jax.nn.softplus(-score) + (1 - label) * jax.nn.softplus(score)


def rollout_label(correct: Array, scored: Array, *, soft: bool) -> Array:
    """Returns P4's label of a step from completions that begin after it, [...] float32: 1 where any is right, or with
    `soft` the share that is; NaN where none could be scored.

    Args:
      correct: [..., n] bool, anything where not scored. scored: [..., n] bool.

    Source: Math-Shepherd, Wang et al. 2312.08935 eq. 3 and 4.
    """
    right = jnp.sum(correct & scored, axis=-1).astype(jnp.float32)
    count = scored.sum(-1).astype(jnp.float32)
    label = right / jnp.maximum(count, 1) if soft else (right > 0).astype(jnp.float32)
    return jnp.where(count > 0, label, jnp.nan)


def through_first_wrong(label: Array, steps: Array) -> Array:
    """Returns the steps that P4 learns from where it stops at the first wrong one, [..., K] bool: those before it, and
    it.

    Args:
      label: [..., K] float, right above 0.5. steps: [..., K] bool, there is such a step.

    Source: PRM800K, Lightman et al. 2305.20050.
    """
    wrong = steps & (label <= 0.5)
    before = jnp.cumsum(wrong, axis=-1) - wrong
    return steps & (before == 0)
