"""Running mean and standard deviation of all rewards so far, to scale rewards by (PPO-max)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array

SMALLEST_DEVIATION = 1e-8  # less counts as none, and nothing is scaled


class Moments(NamedTuple):
    """Running moments of all numbers so far."""

    count: Array  # [] float32
    mean: Array  # [] float32, 0 of none
    squares: Array  # [] float32, sum of squared distances to the mean


def no_moments() -> Moments:
    """Returns the moments of an empty set."""
    return Moments(*jnp.zeros((3,), jnp.float32))


def add_to_moments(moments: Moments, x: Array, mask: Array) -> Moments:
    """Returns R18's moments after adding a batch.

        mean' = mean + d n / (count + n),  squares' = squares + squares_of_batch + d^2 count n / (count + n)

    with d = mean of the batch - mean, which avoids cancellation. Equal numbers have squares of exactly 0 (E1): the mean
    of a batch is computed from the distances to its smallest number.

    Args:
      x: [N] float; masked entries may be NaN. mask: [N] bool.

    Source: Chan et al. 1983.
    """
    x, more = reduce.widen(x), jnp.sum(mask).astype(moments.count.dtype)
    low = jnp.where(more > 0, jnp.min(jnp.where(mask, x, jnp.inf)), 0)
    mean = low + reduce.masked_mean(x - low, mask)
    squares = jnp.sum(jnp.where(mask, (x - mean) ** 2, 0))
    count = moments.count + more
    share = more / jnp.maximum(count, 1)
    d = mean - moments.mean
    updated = Moments(count, moments.mean + d * share, moments.squares + squares + d**2 * moments.count * share)
    return Moments(*(new.astype(old.dtype) for new, old in zip(updated, moments)))


def scale_by_moments(x: Array, moments: Moments) -> Array:
    """Returns R18 (c): x / std, std the sample deviation (n - 1) of all numbers so far. [...] float32 or wider, without
    gradient; x itself where fewer than two numbers are known, or all are equal.

    The mean is not subtracted: a reward above 0 stays above 0.

    Source: PPO-max, Zheng et al. 2307.04964, which limits the result to +-10.
    """
    deviation = jnp.sqrt(moments.squares / jnp.maximum(moments.count - 1, 1))
    known = (moments.count > 1) & (deviation > SMALLEST_DEVIATION)
    return jax.lax.stop_gradient(reduce.widen(x) / jnp.where(known, deviation, 1))
