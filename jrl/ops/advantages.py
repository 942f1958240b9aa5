"""Advantages from rewards, without gradients. Advantages from values are in jrl.ops.gae and jrl.ops.vtrace.

Row-level functions take and return [N]; `spread` puts a row's advantage on each of its sampled tokens. `valid` marks
the rows that count: a missing reward (E3) or an empty completion (E4) enters no statistic and gets advantage 0. A group
whose rewards are all equal gets exactly 0, tested by comparison (E1): in peers, rounding errors divided by a small
epsilon have become real gradients. A group of one gets 0 (E2; peers return the raw reward, return NaN, or raise an
error).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import groups, reduce

Array = jax.Array

EPSILON = 1e-6  # added to a standard deviation, as in verl and Tunix (TRL 1e-4, open-instruct 1e-8, OpenRLHF 1e-9)


def discounted_returns(token_reward: Array, action_mask: Array, *, discount: float) -> Array:
    """Returns A1: Ret_t = r_t + discount * Ret_{t'} with t' the next *sampled* token.

    Tokens that the policy did not sample (tool output) are skipped: they add no discount and do not reset the return
    (verl's first REINFORCE++ did reset it).

    Args:
      token_reward: [N, T] float. action_mask: [N, T] bool.

    Returns:
      [N, T] float32 or wider, 0 where not an action.
    """
    reward = reduce.masked(token_reward, action_mask)
    start = reduce.zeros_of_rows(reward), jnp.asarray(discount)
    return jax.lax.scan(_return_before, start, (reward.T, action_mask.T), reverse=True)[1].T


def _return_before(later: tuple[Array, Array], column: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
    """A1 for one column; a module-level function with the rate in the carry, as in `jrl.ops.gae`."""
    (next_return, discount), (reward, is_action) = later, column
    this_return = jnp.where(is_action, reward + discount * next_return, next_return).astype(next_return.dtype)
    return (this_return, discount), jnp.where(is_action, this_return, 0).astype(next_return.dtype)


def moving_baseline(reward: Array, valid: Array, baseline: Array, *, decay: float) -> tuple[Array, Array]:
    """Returns A2: (R_i - b, the next baseline decay * b + (1 - decay) * mean(R)).

    b is the baseline *before* this batch. A NaN baseline (before the first batch) becomes the batch's own mean;
    prime-rl starts at 0 and takes a large first step. A batch without a valid row does not change the baseline. While
    all rewards have been equal, the baseline is exactly that reward, and advantages are 0 (E1): Adam would make of the
    rounding error of a mean as long a step as of a signal.

    Args:
      reward: [N] float. valid: [N] bool. baseline: [] float.

    Returns:
      advantages [N] and baseline [], float32 or wider.

    Source: prime-rl's moving-average baseline; Williams 1992.
    """
    any_valid = jnp.any(valid)
    low = jnp.min(jnp.where(valid, reduce.widen(reward), jnp.inf))
    mean = low + reduce.masked_mean(reward - low, valid)
    old = jnp.where(jnp.isnan(baseline), mean, baseline)
    new = jnp.where(any_valid, old + (1 - decay) * (mean - old), baseline)
    return jnp.where(valid, reduce.masked(reward, valid) - old, 0), new.astype(jnp.asarray(baseline).dtype)


def group_zscore(reward: Array, group: Array, valid: Array, *, num_groups: int, epsilon: float = EPSILON) -> Array:
    """Returns A3, GRPO: (R_i - mean_g) / (std_g + epsilon), std with n - 1.

    Args:
      reward: [N] float; invalid entries may be NaN. group: [N] int32 in 0..num_groups-1. valid: [N] bool.

    Returns:
      [N] float32 or wider.

    Source: Shao et al. 2402.03300 section 4.1.2. n - 1 in verl, TRL, Tunix and OpenRLHF; n in open-instruct.
    """
    centered = group_centered(reward, group, valid, num_groups=num_groups)
    rows = groups.count(group, valid, num_groups=num_groups)
    variance = groups.total(centered * centered, group, valid, num_groups=num_groups) / jnp.maximum(rows - 1, 1)
    return centered / (groups.to_rows(jnp.sqrt(variance), group) + epsilon)


def group_centered(reward: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns A4, Dr.GRPO: R_i - mean_g. Arguments and result as `group_zscore`.

    Source: Liu et al. 2503.20783 section 3.3. The default of prime-rl and open-instruct, under GRPO's name.
    """
    mean = groups.to_rows(groups.mean(reward, group, valid, num_groups=num_groups), group)
    varied = groups.to_rows(groups.varied(reward, group, valid, num_groups=num_groups), group)
    return jnp.where(valid & varied, reduce.masked(reward, valid) - mean, 0)


def leave_one_out(reward: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns A5, RLOO: R_i - (mean of the others' rewards) = n / (n - 1) * (R_i - mean_g).

    Arguments and result as `group_zscore`.

    Source: Ahmadian et al. 2402.14740 section 3.3. A group of one gets 0; verl's loop version returns R_i.
    """
    rows = groups.to_rows(groups.count(group, valid, num_groups=num_groups), group)
    centered = group_centered(reward, group, valid, num_groups=num_groups)
    return centered * (rows / jnp.maximum(rows - 1, 1)).astype(centered.dtype)


def whitened_returns(token_reward: Array, action_mask: Array, valid: Array, *, discount: float) -> Array:
    """Returns A7, REINFORCE++: returns (A1) whitened over all sampled tokens of the valid rows of the batch.

    All zero if the returns are all equal. Long rows weigh more in these statistics than short ones.

    Args:
      token_reward: [N, T] float, including the KL (R17). action_mask: [N, T] bool. valid: [N] bool.

    Returns:
      [N, T] float32 or wider.

    Source: Hu 2501.03262.
    """
    counts = action_mask & valid[:, None]
    return reduce.whiten(discounted_returns(token_reward, counts, discount=discount), counts)


def whitened_centered(reward: Array, group: Array, valid: Array, action_mask: Array, *, num_groups: int) -> Array:
    """Returns A8, REINFORCE++-baseline: R_i - mean_g, whitened over all sampled tokens of the valid rows of the batch.

    Groups of equal rewards contribute their zeros to the statistics.

    Args:
      reward: [N] float. group: [N] int32. valid: [N] bool. action_mask: [N, T] bool.

    Returns:
      [N, T] float32 or wider.

    Source: Hu 2501.03262 section 3; verl and OpenRLHF (verl leaves the raw reward in a group of one).
    """
    centered = group_centered(reward, group, valid, num_groups=num_groups)
    return reduce.whiten(spread(centered, action_mask), action_mask & valid[:, None])


def group_mean_batch_std(
    reward: Array, group: Array, valid: Array, *, num_groups: int, epsilon: float = EPSILON
) -> Array:
    """Returns A9, Lite-PPO: (R_i - mean_g) / (std of all valid rewards of the batch + epsilon), std with n - 1.

    Arguments and result as `group_zscore`. All zero if all rewards of the batch are equal.

    Source: Liu et al. 2508.08221 section 4; that the standard deviation is of raw rewards, not of centered ones, is our
    interpretation.
    """
    centered = group_centered(reward, group, valid, num_groups=num_groups)
    return centered / (jnp.sqrt(reduce.masked_var(reward, valid)) + epsilon)


def component_zscores(
    components: Array, weights: Array, group: Array, valid: Array, *, num_groups: int, epsilon: float = EPSILON
) -> Array:
    """Returns A12, GDPO: sum_k weights_k * (A3 of component k), before whitening over the batch.

    Each component is divided by its own std, so that a component with a small scale is not drowned by another. A
    component with equal values in the group adds exactly 0. NaN in a component (a verifier that does not apply to the
    row) removes the row from that component's statistics only.

    Args:
      components: [K, N] float. weights: [K] float. group: [N] int32. valid: [N] bool.

    Returns:
      [N] float32 or wider.

    Source: GDPO as in verl.
    """
    zscore = lambda x: group_zscore(x, group, valid & ~jnp.isnan(x), num_groups=num_groups, epsilon=epsilon)
    return jnp.sum(weights[:, None] * jax.vmap(zscore)(components), axis=0)


def whiten_by_task(advantages: Array, task: Array, mask: Array, *, num_tasks: int) -> Array:
    """Returns A23 by task: (A - mean) / sqrt(var + 1e-8), with statistics over the masked tokens of each task's rows.

    All 0 for a task whose advantages are all equal. Variance with n - 1, as in `reduce.whiten`.

    Args:
      advantages: [N, T] float; masked entries may be NaN. task: [N] int32, 0..num_tasks-1. mask: [N, T] bool.

    Returns:
      [N, T] float32 or wider, 0 where masked.
    """
    rows = jnp.any(mask, axis=-1)
    total = lambda x: groups.total(x, task, rows, num_groups=num_tasks)
    to_rows = lambda x: groups.to_rows(x, task)[:, None]
    count = total(jnp.sum(mask, axis=-1))
    x = reduce.masked(advantages, mask)
    deviation = jnp.where(mask, x - to_rows(total(jnp.sum(x, axis=-1)) / jnp.maximum(count, 1)), 0)
    variance = total(jnp.sum(deviation * deviation, axis=-1)) / jnp.maximum(count - 1, 1)
    highest = groups.maximum(jnp.max(jnp.where(mask, x, -jnp.inf), axis=-1), task, rows, num_groups=num_tasks)
    lowest = groups.minimum(jnp.min(jnp.where(mask, x, jnp.inf), axis=-1), task, rows, num_groups=num_tasks)
    varied = to_rows(~(highest <= lowest))  # or NaN
    return jnp.where(mask & varied, deviation / jnp.sqrt(to_rows(variance) + reduce.WHITEN_EPSILON), 0)


def clip_advantages(advantages: Array, *, limit: float) -> Array:
    """Returns A23's clip: advantages limited to [-limit, limit]. MOSS-RLHF clips at 0.5; off in all others."""
    return jnp.clip(reduce.widen(advantages), -limit, limit)


def spread(advantage: Array, action_mask: Array) -> Array:
    """Returns a row's advantage on each of its sampled tokens. [N] float, [N, T] bool -> [N, T], 0 elsewhere."""
    return jnp.where(action_mask, advantage[:, None], 0)
