"""Credit per turn of a dialogue: the return of a turn relative to the same turn of the group's other rows.

Per-turn arrays are [N, K], K the most turns of a row; `present` marks the turns that a row has. Three ways of credit:

    trajectory   one reward for all turns: sum(turn_reward) as the row's reward, and any of A3 to A9
    turn         `turn_advantages`: the rewards from a turn on, minus their mean over the group
    independent  the same with discount 0: each turn for itself (SCoRe)

With values of the state before each turn, `jrl.ops.gae.gae` on [N, K] is GAE over turns. Nothing carries a gradient.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jrl.ops import advantages

Array = jax.Array


def turn_advantages(
    turn_reward: Array, present: Array, group: Array, valid: Array, *, discount: float, num_groups: int
) -> Array:
    """Returns A21: Ret_k - mean of the group's Ret_k at the same turn, Ret_k = sum_{j >= k} discount^(j - k) r_j.

    A row with fewer turns does not enter the statistics of later ones. A turn that only one row of the group has, or
    whose returns are all equal, gets exactly 0.

    Args:
      turn_reward: [N, K] float; absent entries may be NaN. present: [N, K] bool, the row has such a turn.
      group: [N] int32. valid: [N] bool. discount: by turn; 1: all that follows, 0: each turn for itself.

    Returns:
      [N, K] float32 or wider, 0 where absent.

    Source: multi-turn GRPO in verl, prime-rl and open-instruct gives one reward to all turns; the baseline by turn is
    ours.
    """
    counts = present & valid[:, None]
    returns = advantages.discounted_returns(turn_reward, counts, discount=discount)
    center = functools.partial(advantages.group_centered, num_groups=num_groups)
    return jax.vmap(center, in_axes=(1, None, 1), out_axes=1)(returns, group, counts)


def spread_turns(advantage: Array, turn: Array, action_mask: Array) -> Array:
    """Returns a turn's advantage on each of its sampled tokens, [N, T], 0 elsewhere (A21).

    Args:
      advantage: [N, K] float. turn: [N, T] int, 0..K-1 on sampled tokens. action_mask: [N, T] bool.
    """
    at = jnp.where(action_mask, turn, 0).astype(jnp.int32)
    return jnp.where(action_mask, jnp.take_along_axis(advantage, at, axis=-1), 0)
