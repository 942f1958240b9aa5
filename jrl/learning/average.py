"""A moving average of the weights that are trained: the role `average`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.types import Array, ModelState

AVERAGE = "average"  # the role


def moved_average(average: ModelState, trained: ModelState, decay: Array, sound: Array) -> ModelState:
    """Returns the average after an update: decay * average + (1 - decay) * weights, heads included.

    It starts as a copy of the weights, so it needs no correction. After t updates the weights of k updates ago have
    the share (1 - decay) decay^k. Where not `sound` it keeps every bit.

    Args:
      decay: [] float, 0 to 1. sound: [] bool.

    Source: 1710.10741 (as EMA); averages of iterates: Polyak and Juditsky 1992.
    """

    def move(old: Array, new: Array) -> Array:
        return jnp.where(sound, (decay * old + (1 - decay) * new).astype(old.dtype), old)

    return average.replace(
        params=jax.tree.map(move, average.params, trained.params),
        heads=jax.tree.map(move, average.heads, trained.heads),
    )
