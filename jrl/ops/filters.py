"""Which rows enter the loss. A filter returns a mask: it never deletes rows and never edits a reward."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import groups, reduce
from jrl.ops.reward_telemetry import correlation
from jrl.types import Finish

Array = jax.Array


def has_signal(outcome: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns F1: True for the rows of a group whose valid outcomes are not all equal.

    Use the unshaped outcome, since shaping makes every group varied. A group with fewer than two valid rows has no
    signal (DAPO's recipe keeps them).

    Args:
      outcome: [N] float; invalid entries may be NaN. group: [N] int32 in 0..num_groups-1. valid: [N] bool.

    Returns:
      [N] bool; also True for invalid rows of a group with signal, which other masks remove.

    Source: DAPO, 2503.14476 eq. 11. verl: standard deviation above 0; slime: above 1e-6; AReaL: mean strictly between.
    """
    return groups.to_rows(groups.varied(outcome, group, valid, num_groups=num_groups), group)


def unsolved(correct: Array, valid: Array) -> Array:
    """Returns F5: True for prompts that the policy's greedy answer does not solve, [N] bool.

    A prompt whose greedy answer was not scored (E3) stays.

    Args:
      correct: [N] bool or float, above 0 if the answer is right; may be NaN where not valid. valid: [N] bool.

    Source: SELF, 2510.02230.
    """
    return ~(reduce.masked(correct, valid) > 0)


def best(reward: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns F10 by best of n: True for the highest valid reward of each group, at ties the lowest index, [N] bool.

    Args:
      reward: [N] float; invalid entries may be NaN. group: [N] int32. valid: [N] bool.

    Source: PF-PPO, 2409.06957 section 3.2. verl resamples the whole batch by |score|^p, another algorithm.
    """
    return groups.first_highest(reward, group, valid, num_groups=num_groups)


def best_and_worst(reward: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns F10 by best and worst: True for the highest reward of each group and the lowest of its others, [N] bool.

    A group with one valid row keeps it. At ties the lowest index is taken. Arguments and source as in `best`.
    """
    top = best(reward, group, valid, num_groups=num_groups)
    return top | best(-reward, group, valid & ~top, num_groups=num_groups)


def best_and_random(reward: Array, group: Array, valid: Array, draw: Array, *, num_groups: int) -> Array:
    """Returns F10 by best and random: True for the highest reward of each group and for that of its others with the
    highest `draw`, [N] bool.

    Args:
      draw: [N] float, uniform. The rest, and the source, as in `best`.
    """
    top = best(reward, group, valid, num_groups=num_groups)
    return top | best(draw, group, valid & ~top, num_groups=num_groups)


def score_agreement(score: Array, truth: Array, keep: Array) -> Array:
    """Returns F10's criterion: R^2 of a linear fit of the true scores to a reward model's over the kept rows, [].

    Use F10's strategy with the highest R^2 on rows with known true scores. It is the squared correlation; 0 if either
    is constant.

    Args:
      score, truth: [N] float; entries that are not kept may be NaN. keep: [N] bool.

    Source: PF-PPO, 2409.06957 section 3.3.
    """
    return jnp.square(correlation(score, truth, keep))


def not_stale(version: Array, action_mask: Array, current: Array, *, most: int) -> Array:
    """Returns F11: True for rows whose oldest sampled token is at most `most` versions old, [N] bool.

    Args:
      version: [N, T] int32, the version that drew each token; unused where not an action. action_mask: [N, T] bool.
      current: [] int32. Rows without a sampled token are True; other masks remove them (E4).

    Source: AReaL, 2505.24298 section 5.1.
    """
    oldest = jnp.min(jnp.where(action_mask, version, current), axis=-1)
    return current - oldest <= most


def not_truncated(finish: Array) -> Array:
    """Returns F3: False for rows truncated at the length limit, [N] bool.

    Such a row leaves the loss but stays in its group's statistics, since its failure is information.

    Args:
      finish: [N] int8, a Finish.

    Source: DAPO, 2503.14476 section 3.4; TRL's `mask_truncated_completions`. open-instruct deletes the rows.
    """
    return finish != jnp.int8(Finish.LENGTH)
