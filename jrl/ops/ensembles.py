"""One score from an ensemble of reward models. Members are the leading axis: scores [M, ...].

If a member's score is missing (NaN), so is every combined score.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array

SMALLEST_SPREAD = 1e-6  # of a member's scores; below it the member is not scaled


def standardized(scores: Array, center: Array, scale: Array) -> Array:
    """Returns R10's normalization (R30, detail 13), which also puts R11's members on a common scale:

        (scores - center) / scale

    Args:
      scores: [N, K] float, of one reward model and its K labels. center, scale: [K] float, mean and standard deviation
        of its scores of demonstrations; with scale 1 only the bias is removed, so that demonstrations score 0 on
        average. A scale of at most 1e-6 is replaced by 1.

    Returns:
      [N, K] float32 or wider.

    Source: the bias N+, 2403.17031, and Stiennon et al. 2009.01325.
    """
    scale = jnp.where(scale <= SMALLEST_SPREAD, 1, scale)  # an unknown scale stays NaN, and so do scores
    return (reduce.widen(scores) - center[None]) / scale[None]


def mean_score(scores: Array) -> Array:
    """Returns R11, the mean over members. [M, ...] -> [...] float32 or wider."""
    return jnp.mean(reduce.widen(scores), axis=0)


def worst_case(scores: Array) -> Array:
    """Returns R11's WCO, the smallest of the members' scores. [M, ...] -> [...] float32 or wider.

    Source: Coste et al. 2310.02743 section 3.
    """
    return jnp.min(reduce.widen(scores), axis=0)


def variance_penalized(scores: Array, *, coefficient: float) -> Array:
    """Returns R11's UWO: mean - coefficient * variance over members. [M, ...] -> [...] float32 or wider.

    The variance divides by M (as in the paper; its code divides by M - 1), so a single member has no penalty.

    Source: Coste et al. 2310.02743 section 3: coefficient 0.5 for best of n, 0.1 for PPO.
    """
    x = reduce.widen(scores)
    return jnp.mean(x, axis=0) - coefficient * jnp.var(x, axis=0)


def nominal_worst_case(scores: Array, *, share: float) -> Array:
    """Returns R11's BRME: share * s_0 + (1 - share) * min_j s_j; the first member is the nominal one.

    [M, ...] -> [...] float32 or wider.

    Source: 2409.15360, whose nominal member is the most certain one.
    """
    x = reduce.widen(scores)
    return share * x[0] + (1 - share) * jnp.min(x, axis=0)
