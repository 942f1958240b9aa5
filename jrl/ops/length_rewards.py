"""Rewards for short completions, relative to the prompt's other completions or to a target."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import groups

Array = jax.Array


def group_length_reward(length: Array, correct: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns R6, Kimi k1.5's length reward, to be added with a weight:

        lam_i = 0.5 - (len_i - min) / (max - min);    lam_i if correct, else min(0, lam_i)

    min and max are over the valid rows of the group; where they are equal the reward is 0. A wrong answer is never
    rewarded for being short.

    Args:
      length: [N] int32, sampled tokens. correct: [N] bool; False for truncated completions.
      group: [N] int32. valid: [N] bool, judged and not empty.

    Returns:
      [N] float32 or wider in [-0.5, 0.5], 0 where not valid.

    Source: Kimi k1.5, 2501.12599 section 2.3.3, which turns it on only after an initial phase.
    """
    shortest = groups.minimum(length, group, valid, num_groups=num_groups)
    longest = groups.maximum(length, group, valid, num_groups=num_groups)
    span = groups.to_rows(longest - shortest, group)
    lam = 0.5 - (length - groups.to_rows(shortest, group)) / span  # NaN or infinite where it is masked below
    lam = jnp.where(correct, lam, jnp.minimum(lam, 0))
    return jnp.where(valid & groups.to_rows(longest > shortest, group), lam, 0)


def conciseness_reward(length: Array, correct: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns R8, R6 among the correct rows of a group only: 0.5 for the shortest, -0.5 for the longest.

    0 for a wrong row of any length, and in groups without two correct rows of different length.

    Args, Returns: as `group_length_reward`.
    """
    return group_length_reward(length, correct, group, valid & correct, num_groups=num_groups)


def length_penalty(length: Array, *, target: float) -> Array:
    """Returns R8, linear: -max(0, length - target) / target, to be added with a weight; 0 up to the target.

    Args:
      length: [N] int32, sampled tokens. target: tokens, above 0.

    Returns:
      [N] float32 or wider, at most 0.

    Source: prime-rl.
    """
    return -jnp.maximum(length - target, 0) / target
