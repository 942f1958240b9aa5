"""Where a completion is branched: at one of the tokens that the policy was most uncertain of (S8)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def most_uncertain(entropy: Array, eligible: Array, *, count: int) -> Array:
    """Returns S8's candidates, [N, T] bool: the `count` eligible tokens of each row with the largest entropy, or all of
    them. Of equal entropies the first is taken.

    Args:
      entropy: [N, T] float, nats, of the distribution that the token was drawn from; may be NaN where not eligible.
      eligible: [N, T] bool. count: 20 in CURE.
    """
    ranked = jnp.argsort(jnp.where(eligible, -entropy, jnp.inf), axis=-1)
    rank = jnp.argsort(ranked, axis=-1)
    return eligible & (rank < count)


def branch_column(candidates: Array, noise: Array) -> Array:
    """Returns the column that S8 branches at, [N] int32: a fair draw among the candidates; -1 where there is none.

    The tokens before it are kept and it is drawn anew.

    Args:
      candidates: [N, T] bool. noise: [N, T] float, uniform in [0, 1).
    """
    column = jnp.argmax(jnp.where(candidates, noise, -jnp.inf), axis=-1).astype(jnp.int32)
    return jnp.where(candidates.any(axis=-1), column, -1)
