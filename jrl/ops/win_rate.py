"""How often a completion beats its prompt's opponents (P18)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import groups, reduce

Array = jax.Array


def win_probability(reward: Array, group: Array, players: Array, opponents: Array, *, num_groups: int) -> Array:
    """Returns P18's P, [N] float32 or wider: the share of its prompt's opponents that a row beats, a tie counts half.

    It is 1/2 outside `players`, and for a row without an opponent. A row is not its own opponent.

    Args:
      reward: [N] float; may be NaN outside both masks. group: [N] int32. players, opponents: [N] bool.

    Source: Nash-MD, Munos et al. 2312.00886, where a model of preferences gives P.
    """
    reward = reduce.masked(reward, players | opponents)
    of = lambda value: groups.to_rows(value, group)
    count = lambda rows: of(groups.count(group, rows, num_groups=num_groups)).astype(reward.dtype)

    def meet_the_best(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        """Compares every row with the best remaining opponents of its group, all tied ones at once."""
        left, beaten = carry
        best = of(groups.maximum(reward, group, left, num_groups=num_groups))
        met = left & ~(reward < best)  # a NaN ends the loop too
        outcome = jnp.where(reward > best, 1, jnp.where(reward == best, 0.5, 0)).astype(reward.dtype)
        return left & ~met, beaten + outcome * count(met)

    _, beaten = jax.lax.while_loop(lambda carry: carry[0].any(), meet_the_best, (opponents, jnp.zeros_like(reward)))
    itself = opponents.astype(reward.dtype)
    others = count(opponents) - itself
    share = (beaten - 0.5 * itself) / jnp.maximum(others, 1)
    return jnp.where(players & (others > 0), share, 0.5).astype(reward.dtype)
