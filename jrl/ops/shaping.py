"""Reward shaping, before advantages are computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import kl, reduce

Array = jax.Array

KL_ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


def soft_overlong(length: Array, *, max_completion: int, buffer: int, penalty: float = 1.0) -> Array:
    """Returns R7, DAPO's soft overlong punishment, to be added to the reward:

        penalty * clip((max_completion - buffer - length) / buffer, -1, 0)

    0 up to max_completion - buffer tokens, then linear down to -penalty at max_completion.

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
    estimator: str = "k1",
) -> Array:
    """Returns R17 (R30, detail 20): r_t = -beta * k(old_logprobs_t - ref_logprobs_t), plus `reward` on the last sampled
    token, with k one of

        k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, of k3 d is clamped to +-20 (E9)

    The only per-token KL penalty whose gradient includes a token's effect on later states. k1 is unbiased and its sum
    is the sequence's log-ratio; k2 and k3 penalize every token that moved, in either direction.

    Args:
      reward: [N] float. old_logprobs, ref_logprobs: [N, T] float, of the weights that sampled.
      action_mask: [N, T] bool; a row without a sampled token carries no reward (E4).
      estimator: one of KL_ESTIMATORS.

    Returns:
      [N, T] float32 or wider, without gradient, 0 where not an action.

    See docs/algorithms.md, R17. TRL's PPO and N+ put the reward one token later, on the first pad; verl puts that of
    an empty row on the last column.
    """
    penalty = -beta * KL_ESTIMATORS[estimator](old_logprobs, ref_logprobs, action_mask)
    final = jnp.where(last_action(action_mask), reward[:, None], 0)
    return jax.lax.stop_gradient(penalty + final)


def clip_reward(reward: Array, *, limit: float) -> Array:
    """Returns R18a: the reward limited to [-limit, limit], [N] float32 or wider. NaN stays.

    Args:
      reward: [N] float.

    Source: MOSS-RLHF's PPO-max, 2307.04964, which clips at 10 after its running scale.
    """
    return jnp.clip(reduce.widen(reward), -limit, limit)


def whiten_rewards(token_reward: Array, mask: Array) -> Array:
    """Returns R18b (R30, detail 21), rewards with their mean kept: (r - mean) / std + mean over all sampled tokens, std
    with n - 1.

    Unchanged if fewer than two tokens count or all rewards are equal. If they include a KL (R17), its coefficient is
    divided by std too.

    Args:
      token_reward: [N, T] float. mask: [N, T] bool, sampled tokens of the rows that count.

    Returns:
      [N, T] float32 or wider, 0 where masked.

    Source: N+, 2403.17031 (TRL's whiten_rewards without a shift), over a minibatch there.
    """
    r = reduce.widen(token_reward)
    high, low = jnp.max(jnp.where(mask, r, -jnp.inf)), jnp.min(jnp.where(mask, r, jnp.inf))
    scaled = reduce.whiten(r, mask) + reduce.masked_mean(r, mask)
    return jnp.where(mask, jnp.where(high > low, scaled, r), 0)


def exploration_mix(reward: Array, exploration: Array, *, share: float) -> Array:
    """Returns R22: share * reward + (1 - share) * exploration, [N] float32 or wider.

    Args:
      reward: [N] float, of verification. exploration: [N] float, a cheap signal of search, such as the length of the
        reasoning; limited to [0, 1] here, so that it cannot drown the other. share: 0.8 is RLSP's.

    Source: RLSP, 2502.06773.
    """
    return share * reduce.widen(reward) + (1 - share) * jnp.clip(reduce.widen(exploration), 0, 1)


def progress_bonus(first: Array, second: Array, *, coefficient: float) -> Array:
    """Returns R24, SCoRe's reward of a second attempt: second + coefficient * (second - first).

    Wrong and then right earns 1 + coefficient, right and then wrong -coefficient. The first attempt's own reward stays
    `first`.

    Args:
      first, second: [N] float, rewards of the attempts; 0 for a second one that is not there. coefficient: 10 in SCoRe.

    Returns: [N] float32 or wider.

    Source: SCoRe, 2409.12917 section 4.2.
    """
    second = reduce.widen(second)
    return second + coefficient * (second - first)


def attempt_rewards(first: Array, second: Array, action_mask: Array, turn: Array, *, coefficient: float) -> Array:
    """Returns R24 on tokens: `first` on the last sampled token of turn 0, and the reward with its bonus on that of turn
    1. No return may flow from the second attempt to the first: compute returns within each turn.

    Args:
      first, second: [N] float; `second` is unused if the second attempt has no sampled token.
      action_mask: [N, T] bool. turn: [N, T] int, 0 and 1; unused where not an action.

    Returns: [N, T] float32 or wider, 0 elsewhere, without gradient.
    """
    before, after = action_mask & (turn == 0), action_mask & (turn == 1)
    bonus = progress_bonus(first, second, coefficient=coefficient)
    placed = jnp.where(last_action(before), first[:, None], 0)
    return jax.lax.stop_gradient(placed + jnp.where(last_action(after), bonus[:, None], 0))


def potential_shaping(token_reward: Array, potential: Array, action_mask: Array, *, discount: float) -> Array:
    """Returns R27: r_t + discount * Phi(s_{t+1}) - Phi(s_t) on sampled tokens, Phi = 0 after the last one.

    It changes when rewards arrive but not which policy is best. A truncated completion also counts as terminal: a
    potential that remained there would reward truncation.

    Args:
      token_reward: [N, T] float. potential: [N, T] float, Phi of the state before each sampled token; a row with NaN on
        one of them is not shaped. action_mask: [N, T] bool; what is masked may be NaN.
      discount: by sampled token, as in the returns.

    Returns: [N, T] float32 or wider, 0 where not an action, without gradient.

    Source: Ng, Harada and Russell 1999.
    """
    known = ~jnp.any(action_mask & jnp.isnan(potential), axis=1, keepdims=True)
    here = jnp.where(action_mask & known, reduce.widen(potential), 0)

    def back(following: Array, column: tuple[Array, Array]) -> tuple[Array, Array]:
        phi, acts = column
        return jnp.where(acts, phi, following), following

    end = jnp.zeros(len(here), here.dtype)
    _, following = jax.lax.scan(back, end, (here.T, action_mask.T), reverse=True)
    shaped = reduce.masked(token_reward, action_mask) + jnp.where(action_mask, discount * following.T - here, 0)
    return jax.lax.stop_gradient(shaped)


def last_action(action_mask: Array) -> Array:
    """Returns [N, T] bool, True on the last sampled token of a row; none in a row without one."""
    later = jnp.flip(jnp.cumsum(jnp.flip(action_mask, axis=-1), axis=-1, dtype=jnp.int32), axis=-1)
    return action_mask & (later == 1)
