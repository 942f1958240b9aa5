"""Advantages from values: GAE over sampled tokens, with a lambda per row, and over macro actions.

Nothing here carries a gradient. Tokens that the policy did not sample are skipped: in a plain recursion with values of
0, the token before a tool's output would have no future return (TRL's PPO, OpenRLHF). A reward on such a token counts
for the sampled token before it. A truncated row is treated as terminal.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def gae(token_reward: Array, values: Array, action_mask: Array, *, discount: float, gae_lambda: float | Array) -> Array:
    """Returns A13, generalized advantage estimates, from the end of a row to its start over sampled tokens:

        delta_t = r_t + discount * v_{t'} - v_t,  A_t = delta_t + discount * gae_lambda * A_{t'}

    with t' the next sampled token, and v = A = 0 after the last.

    Args:
      token_reward: [N, T] float. values: [N, T] float, of the state before the token is chosen.
      action_mask: [N, T] bool. gae_lambda: lambda, [] or [N], one per row; at 1 A_t is the return minus v_t, at 0 it is
        delta_t.

    Returns:
      [N, T] float32 or wider, 0 where not an action.

    Source: Schulman et al. 1506.02438 eq. 16; gaps are skipped as in verl, Tunix, AReaL and NeMo.
    """
    values = reduce.masked(values, action_mask)
    dtype = jnp.promote_types(reduce.widen(token_reward).dtype, values.dtype)
    start = reduce.zeros_of_rows(values, dtype)
    rates = jnp.asarray(discount), jnp.asarray(discount * gae_lambda)
    columns = (token_reward.T.astype(dtype), values.T.astype(dtype), action_mask.T)
    return jax.lax.scan(_token_before, ((start, start, start), rates), columns, reverse=True)[1].T


def _token_before(later: tuple, column: tuple) -> tuple[tuple, Array]:
    """A13 for one column. A module-level function with the rates in the carry, since outside jit a scan recompiles for
    every new function object."""
    (next_value, next_advantage, pending_reward), (discount, decay) = later
    reward, value, is_action = column
    reward = reward + pending_reward
    advantage = (reward + discount * next_value - value + decay * next_advantage).astype(value.dtype)
    carry = (
        jnp.where(is_action, value, next_value),
        jnp.where(is_action, advantage, next_advantage),
        jnp.where(is_action, 0, reward),  # a reward of a token that was not sampled
    )
    return (carry, (discount, decay)), jnp.where(is_action, advantage, 0)


def length_adaptive_lambda(action_mask: Array, *, alpha: float) -> Array:
    """Returns A14's lambda of every row: clip(1 - 1 / (alpha * length), 0, 1), with length its sampled tokens.

    GAE's weights then sum to about alpha * length. With one lambda for all rows, the reward at the end of a long row
    would not reach its start.

    Args:
      action_mask: [N, T] bool. alpha: above 0.

    Returns:
      [N] float32 or wider, 0 for a row of 1 / alpha tokens or fewer.

    Source: VAPO, 2504.05118; alpha 0.05.
    """
    length = jnp.maximum(jnp.sum(action_mask, axis=-1), 1)
    return jnp.clip(1 - 1 / (alpha * length), 0, 1)


def decoupled_gae(
    token_reward: Array,
    values: Array,
    action_mask: Array,
    *,
    discount: float,
    policy_lambda: float | Array,
    critic_lambda: float,
) -> tuple[Array, Array]:
    """Returns A14: (A_t by GAE with policy_lambda, Ret_t = A_t + v_t by GAE with critic_lambda).

    At critic_lambda = 1 the targets are returns, without bias from the values; the policy keeps the lower variance of a
    smaller lambda.

    Args:
      As in `gae`; policy_lambda: [] or [N].

    Returns:
      advantages (before whitening) and returns, [N, T] float32 or wider, 0 where not an action.

    Source: VC-PPO, 2503.01491; VAPO, 2504.05118: critic_lambda 1.
    """
    policy = gae(token_reward, values, action_mask, discount=discount, gae_lambda=policy_lambda)
    critic = gae(token_reward, values, action_mask, discount=discount, gae_lambda=critic_lambda)
    return policy, critic + reduce.masked(values, action_mask)


def ngram_starts(action_mask: Array, *, size: int) -> Array:
    """Returns A15's macro actions of `size` tokens: True on the first token of each, [N, T] bool.

    A macro action never spans tokens that the policy did not sample: a new one starts after them. The last of a run of
    sampled tokens may be shorter.

    Args:
      action_mask: [N, T] bool. size: at least 1; 1 makes every token a macro action.

    Source: MA-RLHF, 2410.02743, fixed n-grams of 5.
    """
    return random_starts(action_mask, jnp.zeros_like(action_mask, jnp.uint32), sizes=(size,))


def random_starts(action_mask: Array, noise: Array, *, sizes: tuple[int, ...]) -> Array:
    """Returns A15's macro actions of random sizes, each drawn from `sizes` with equal probability: True on the first
    token of each, [N, T] bool.

    As in `ngram_starts`, a macro action never spans tokens that the policy did not sample, and is cut short by them.

    Args:
      action_mask: [N, T] bool. noise: [N, T] uint32; a token's number decides the size of a macro that it begins.
      sizes: at least 1 each.

    Source: MA-RLHF, 2410.02743: 1, 2, 3, 5 or 10 tokens.
    """
    which = (noise % len(sizes)).astype(jnp.int32)
    drawn = sum(jnp.where(which == i, size, 0) for i, size in enumerate(sizes))  # rows may be sharded: no gather
    none_left = reduce.zeros_of_rows(drawn)
    return jax.lax.scan(_next_of_macro, none_left, (action_mask.T, drawn.T))[1].T


def _next_of_macro(left: Array, column: tuple[Array, Array]) -> tuple[Array, Array]:
    is_action, drawn = column
    is_start = is_action & (left == 0)
    left = jnp.where(is_start, drawn, left)
    return jnp.where(is_action, left - 1, 0), is_start


def macro_gae(
    token_reward: Array,
    values: Array,
    action_mask: Array,
    macro_start: Array,
    *,
    discount: float,
    gae_lambda: float,
) -> tuple[Array, Array]:
    """Returns A15: GAE (A13) over macro actions, on every token of each macro, and A + V.

    A macro's value V is the mean of its tokens' values, its reward the sum of their rewards; discount and lambda apply
    once per macro. With macros of one token this is A13; with one macro per row, its reward minus V.

    Args:
      As in `gae`; macro_start: [N, T] bool, the first token of every macro. The first token of every run of sampled
        tokens must be one.

    Returns:
      advantages (before whitening) and returns, [N, T] float32 or wider, 0 where not an action.

    Source: MA-RLHF, 2410.02743. The paper sums rewards, its released code averages them.
    """
    values = reduce.masked(values, action_mask)
    dtype = jnp.promote_types(reduce.widen(token_reward).dtype, values.dtype)
    zero = reduce.zeros_of_rows(values, dtype)
    columns = (token_reward.T.astype(dtype), values.T.astype(dtype), action_mask.T, (macro_start & action_mask).T)
    rates = jnp.asarray(discount), jnp.asarray(discount * gae_lambda)
    by_macro = jax.lax.scan(_macro_before, ((zero,) * 5, rates), columns, reverse=True)[1]
    advantages, returns = jax.lax.scan(_to_tokens_of_macro, (zero, zero), (*by_macro, *columns[2:]))[1]
    return advantages.T, returns.T


def _macro_before(later: tuple, column: tuple) -> tuple[tuple, tuple[Array, Array]]:
    """A15 for one column."""
    (next_value, next_advantage, summed_reward, summed_value, count), (discount, decay) = later
    reward, value, is_action, is_start = column
    summed_reward, summed_value, count = summed_reward + reward, summed_value + value, count + is_action
    mean = summed_value / jnp.maximum(count, 1)
    advantage = (summed_reward + discount * next_value - mean + decay * next_advantage).astype(value.dtype)
    carry = (
        jnp.where(is_start, mean, next_value),
        jnp.where(is_start, advantage, next_advantage),
        jnp.where(is_start, 0, summed_reward),
        jnp.where(is_start, 0, summed_value),
        jnp.where(is_start, 0, count),
    )
    return (carry, (discount, decay)), (advantage, advantage + mean)


def _to_tokens_of_macro(macro: tuple, column: tuple) -> tuple[tuple, tuple[Array, Array]]:
    advantage, returns, is_action, is_start = column
    macro = (jnp.where(is_start, advantage, macro[0]), jnp.where(is_start, returns, macro[1]))
    return macro, tuple(jnp.where(is_action, x, 0) for x in macro)
