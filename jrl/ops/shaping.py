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


def clip_reward(reward: Array, *, limit: float) -> Array:
    """Returns R18a: the reward limited to [-limit, limit], [N] float32 or wider. NaN stays.

    Args:
      reward: [N] float.

    Source: MOSS-RLHF's PPO-max, 2307.04964, which clips at 10 after its running scale.
    """
    return jnp.clip(reduce.widen(reward), -limit, limit)


def whiten_rewards(token_reward: Array, mask: Array) -> Array:
    """Returns R18b, rewards with their mean kept: (r - mean) / std + mean over all sampled tokens, std with n - 1.

    As they were where fewer than two tokens count or all are equal. With a KL in them (R17) its coefficient is divided
    by std too.

    Args:
      token_reward: [N, T] float. mask: [N, T] bool, sampled tokens of the rows that count.

    Returns:
      [N, T] float32 or wider, 0 where masked.

    Source: N+, 2403.17031, detail 16 (TRL's whiten_rewards): whitened without a shift, over a minibatch there.
    """
    r = reduce.widen(token_reward)
    high, low = jnp.max(jnp.where(mask, r, -jnp.inf)), jnp.min(jnp.where(mask, r, jnp.inf))
    scaled = reduce.whiten(r, mask) + reduce.masked_mean(r, mask)
    return jnp.where(mask, jnp.where(high > low, scaled, r), 0)


def last_action(action_mask: Array) -> Array:
    """Returns [N, T] bool, True on the last sampled token of a row; none in a row without one."""
    later = jnp.flip(jnp.cumsum(jnp.flip(action_mask, axis=-1), axis=-1, dtype=jnp.int32), axis=-1)
    return action_mask & (later == 1)
