"""Advantages for the best of k samples instead of the average sample, and for rare right answers. Nothing here carries
a gradient.

Arguments and results as in jrl.ops.advantages: rows are [N], `valid` marks those that count, and a group whose values
are all equal, or with a single valid row, gets exactly 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import advantages, groups, reduce

Array = jax.Array


def pass_at_k(correct: Array, group: Array, valid: Array, *, num_groups: int, k: int) -> Array:
    """Returns A11, PKPO, an unbiased gradient of pass@k: with n rows in the group and c of them correct,

        correct: k / n;  wrong: k / n * (1 - C(n - 1 - c, k - 1) / C(n - 1, k - 1));  then minus the group's mean

    A wrong row shares the credit of the correct ones that it may be drawn with. If more than n - k rows are correct,
    every draw has a correct row, and all get 0. So do groups of fewer than k rows, for which pass@k cannot be
    estimated.

    Summed over the group, a_i grad log p_i is on average (1 - k / n) times the gradient of pass@k, since the mean
    includes the row itself; 0 for k = n.

    Args:
      correct: [N] bool. group: [N] int32. valid: [N] bool. k: samples per draw, at least 1; at 1 this is A4 / n.

    Returns:
      [N] float32 or wider.

    Source: Walder and Karkhanis 2505.15201, for binary rewards. Subtracting the group's mean is ours.
    """
    rows = groups.count(group, valid, num_groups=num_groups)
    right = groups.count(group, valid & correct, num_groups=num_groups)
    none_right = jnp.ones(rows.shape)  # the chance that k - 1 of the n - 1 other rows are all wrong
    for drawn in range(k - 1):
        none_right *= jnp.maximum(rows - 1 - right - drawn, 0) / jnp.maximum(rows - 1 - drawn, 1)
    some_right = groups.to_rows(1 - none_right, group)
    size = groups.to_rows(rows, group)
    score = jnp.where(correct, 1, some_right) * k / jnp.maximum(size, 1)
    return advantages.group_centered(score, group, valid & (size >= k), num_groups=num_groups)


def best_minus_second(reward: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns A11's other form: the best row of a group gets its lead over the second best, every other row 0.

    All get 0 if the two best rows tie.

    Args:
      reward: [N] float. group: [N] int32. valid: [N] bool.

    Returns:
      [N] float32 or wider.

    Source: verl's "pass@k" estimator, GRPO_PASSK.
    """
    by_group = lambda fn, x, rows: groups.to_rows(fn(x, group, rows, num_groups=num_groups), group)
    best = valid & (reward == by_group(groups.maximum, reward, valid))
    unique = groups.to_rows(groups.count(group, best, num_groups=num_groups), group) == 1
    varied = by_group(groups.varied, reward, valid)
    second = jnp.where(varied, by_group(groups.maximum, reward, valid & ~best), 0)  # the maximum is -inf if all tie
    return jnp.where(best & unique & varied, reduce.masked(reward, valid) - second, 0)


def relative_to_mean(reward: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns A11, MaxRL: (R_i - mean_g) / mean_g, 0 where the mean is not above 0.

    The rarer a right answer, the more it counts: its advantage among n wrong ones is n.

    Args:
      reward: [N] float, not negative. group: [N] int32. valid: [N] bool.

    Returns:
      [N] float32 or wider.

    Source: prime-rl's MaxRL.
    """
    mean = groups.to_rows(groups.mean(reward, group, valid, num_groups=num_groups), group)
    centered = advantages.group_centered(reward, group, valid, num_groups=num_groups)
    return jnp.where(mean > 0, centered / jnp.where(mean > 0, mean, 1), 0)
