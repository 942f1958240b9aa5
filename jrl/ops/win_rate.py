"""How often a completion beats the opponents that its prompt has (P18)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def win_probability(reward: Array, group: Array, players: Array, opponents: Array) -> Array:
    """Returns P18's P, [N] float32 or wider: the share of its prompt's opponents that a row beats, a tie counts half.

    It is 1/2 off `players`, and for a row without an opponent. A row is no opponent of its own.

    Args:
      reward: [N] float; may be NaN off both masks. group: [N] int32. players, opponents: [N] bool.

    Source: Nash-MD, Munos et al. 2312.00886, where a model of preferences gives P. It makes N * N numbers.
    """
    mine, theirs = reduce.masked(reward, players)[:, None], reduce.masked(reward, opponents)[None, :]
    met = (group[:, None] == group[None, :]) & players[:, None] & opponents[None, :]
    met &= ~jnp.eye(len(group), dtype=bool)
    beaten = jnp.where(mine > theirs, 1, jnp.where(mine == theirs, 0.5, 0)).astype(mine.dtype)
    count = met.sum(-1)
    return jnp.where(count > 0, (beaten * met).sum(-1) / jnp.maximum(count, 1), 0.5).astype(mine.dtype)
