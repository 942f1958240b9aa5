"""Advantages of stored completions, of which only those better than expected are learned from. No gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def better_than_expected(reward: Array, value: Array, valid: Array) -> Array:
    """Returns A19, A-LoL's advantage of a stored completion: max(R_i - V(x), 0).

    V(x) is what a frozen policy earns on the prompt: a head on it, trained on the rewards of its own samples.

    Args:
      reward, value: [N] float; invalid entries may be NaN. valid: [N] bool.

    Returns:
      [N] float32 or wider, 0 where the row is dropped.

    Source: Baheti et al. 2305.14718.
    """
    return jnp.maximum(reduce.masked(reward, valid) - reduce.masked(value, valid), 0)


def sampling_probabilities(advantage: Array) -> Array:
    """Returns the chance to draw each stored row for training, in proportion to its advantage (A19): a_i / sum(a).

    Not for use under jit, since it may refuse.

    Args:
      advantage: [N] float, not negative (`better_than_expected`).

    Returns:
      [N] float32 or wider, of sum 1.

    Raises:
      ValueError where no advantage is above 0.

    Source: Baheti et al. 2305.14718.
    """
    wide = reduce.widen(advantage)
    total = jnp.sum(wide)
    if not total > 0:
        raise ValueError(
            f"none of {advantage.shape[0]} stored rows is better than expected (R - V <= 0 for all): there is nothing "
            "to draw. Check that rewards and values have one scale."
        )
    return wide / total
