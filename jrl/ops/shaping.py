"""Rewards shaped before advantages are taken of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import kl, reduce

Array = jax.Array


def soft_overlong(length: Array, *, max_completion: int, buffer: int, penalty: float = 1.0) -> Array:
    """Returns R7, DAPO's soft overlong punishment, to be added to the reward:

        penalty * clip((max_completion - buffer - length) / buffer, -1, 0)

    nothing up to max_completion - buffer tokens, then a straight line down to -penalty at max_completion.

    Args:
      length: [N] int32, sampled tokens (Tunix counts characters). max_completion, buffer: tokens, 0 < buffer.

    Returns:
      [N] float32 or wider.

    Source: DAPO, 2503.14476 eq. 13. Capped at -1 as in TRL and OpenRLHF; verl, AReaL and Tunix do not cap.
    """
    return penalty * jnp.clip((max_completion - buffer - reduce.widen(length)) / buffer, -1, 0)


def kl_in_reward(
    reward: Array,
    old_logprobs: Array,
    ref_logprobs: Array,
    action_mask: Array,
    *,
    beta: float,
) -> Array:
    """Returns R17 with k1: r_t = -beta * (old_logprobs_t - ref_logprobs_t), plus `reward` on the last sampled token.

    The only per-token KL penalty whose gradient sees what a token does to later states.

    Args:
      reward: [N] float. old_logprobs, ref_logprobs: [N, T] float, of the weights that sampled.
      action_mask: [N, T] bool; a row without a sampled token carries no reward (E4).

    Returns:
      [N, T] float32 or wider, without gradient, 0 where not an action.

    See docs/algorithms.md, R17. TRL's PPO and N+ put the reward one token later, on the first pad; verl puts that of
    an empty row on the last column.
    """
    penalty = -beta * kl.k1(old_logprobs, ref_logprobs, action_mask)
    final = jnp.where(last_action(action_mask), reduce.widen(reward)[:, None], 0)
    return jax.lax.stop_gradient(penalty + final)


def last_action(action_mask: Array) -> Array:
    """Returns [N, T] bool, True on the last sampled token of a row; none in a row without one."""
    later = jnp.flip(jnp.cumsum(jnp.flip(action_mask, axis=-1), axis=-1, dtype=jnp.int32), axis=-1)
    return action_mask & (later == 1)
