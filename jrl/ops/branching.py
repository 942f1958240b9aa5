"""Branch points of a completion: the tokens of which the policy was most uncertain (S8)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def most_uncertain(entropy: Array, eligible: Array, *, count: int) -> Array:
    """Returns S8's candidates, [N, T] bool: the `count` eligible tokens of each row with the largest entropy, or all if
    there are fewer. At ties the first tokens are taken.

    Args:
      entropy: [N, T] float, nats, of the distribution that the token was drawn from; may be NaN where not eligible.
      eligible: [N, T] bool. count: 20 in CURE.
    """
    ranked = jnp.argsort(jnp.where(eligible, -entropy, jnp.inf), axis=-1)
    rank = jnp.argsort(ranked, axis=-1)
    return eligible & (rank < count)


def branch_column(candidates: Array, noise: Array) -> Array:
    """Returns the column that S8 branches at, [N] int32: drawn uniformly from the candidates; -1 if there is none.

    The tokens before it are kept; sampling restarts at it.

    Args:
      candidates: [N, T] bool. noise: [N, T] float, uniform in [0, 1).
    """
    column = jnp.argmax(jnp.where(candidates, noise, -jnp.inf), axis=-1).astype(jnp.int32)
    return jnp.where(candidates.any(axis=-1), column, -1)
