"""Preferences among the samples of a prompt, from a pair model or a judge of two answers.

A preference is the probability that one answer is better than another. Preferences need not be consistent with any
score: they may be cyclic.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def win_share(
    preference: Array, group: Array, sample: Array, players: Array, opponents: Array, *, num_groups: int
) -> Array:
    """Returns R20 and P18's P, the mean preference for a row over the opponents of its prompt, [N] float32 or wider:

        P_ij = (p_ij + 1 - p_ji) / 2,    mean of P_ij over the opponents j that were compared with i in both orders

    It is 1/2 outside `players`, and for a row that was compared with no opponent. A row is not its own opponent.

    Args:
      preference: [N, S] float, [i, s] the probability that row i is better than sample s of its prompt when it is shown
        first; NaN where the two were not compared.
      group: [N] int32 in 0..num_groups-1. sample: [N] int32 in 0..S-1, the row's place among its prompt's samples.
      players, opponents: [N] bool.

    Sources: SALMON 2310.05910 (shares of wins); Nash-MD 2312.00886 (against opponents).
    """
    both, compared = _against(preference, group, sample, opponents, num_groups)
    share = jnp.where(compared, both, 0).sum(-1) / jnp.maximum(compared.sum(-1), 1)
    share = jnp.where(compared.any(-1), share, 0.5)[group, sample]
    return jnp.where(players, share, 0.5)


def compared_with_any(preference: Array, group: Array, sample: Array, opponents: Array, *, num_groups: int) -> Array:
    """Returns the rows that were compared with an opponent of their prompt in both orders, [N] bool. Arguments as in
    `win_share`, whose number means nothing for other rows."""
    return _against(preference, group, sample, opponents, num_groups)[1].any(-1)[group, sample]


def pair_strength(preference: Array, group: Array, sample: Array, paired: Array, *, num_groups: int) -> Array:
    """Returns P17's strength, the preference for a row over the other row of its pair, averaged over both orders, [N]
    float32 or wider; 1/2 for a row without a pair, NaN if the two were not compared.

    Args:
      paired: [N] bool, two rows of a group or none. The rest as in `win_share`.
    """
    table = _by_prompt(preference, group, sample, num_groups)
    both, compared = _both_orders(table)
    flags = _flags(paired, group, sample, table)
    met = flags[:, :, None] & flags[:, None, :] & ~jnp.eye(table.shape[-1], dtype=bool)[None]
    strength = jnp.where(met & compared, both, 0).sum(-1)
    strength = jnp.where((met & compared).any(-1), strength, jnp.nan)[group, sample]
    return jnp.where(paired, strength, 0.5)


def _against(preference: Array, group: Array, sample: Array, opponents: Array, num_groups: int) -> tuple[Array, Array]:
    """Returns (P [num_groups, S, S], whether the second is an opponent that was compared with the first)."""
    table = _by_prompt(preference, group, sample, num_groups)
    both, compared = _both_orders(table)
    return both, compared & _flags(opponents, group, sample, table)[:, None, :]


def _by_prompt(preference: Array, group: Array, sample: Array, num_groups: int) -> Array:
    """Returns [num_groups, S, S], [g, s] the row of sample s of prompt g; NaN where it is missing."""
    preference = reduce.widen(preference)
    samples = preference.shape[1]
    return jnp.full((num_groups, samples, samples), jnp.nan, preference.dtype).at[group, sample].set(preference)


def _flags(rows: Array, group: Array, sample: Array, table: Array) -> Array:
    """Returns a flag of rows by prompt and sample, [num_groups, S] bool; False where a sample is missing."""
    return jnp.zeros(table.shape[:2], bool).at[group, sample].set(rows)


def _both_orders(table: Array) -> tuple[Array, Array]:
    """Returns (P [num_groups, S, S], anything where two were not compared; where they were, in both orders)."""
    both = (table + 1 - jnp.swapaxes(table, 1, 2)) / 2
    return both, jnp.isfinite(both) & ~jnp.eye(table.shape[-1], dtype=bool)[None]
