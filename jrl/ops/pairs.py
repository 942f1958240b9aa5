"""Which of a prompt's samples are compared with one another."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import groups
from jrl.ops.preferences import win_share

Array = jax.Array


def best_against_worst(
    reward: Array, group: Array, valid: Array, *, num_groups: int, margin: float
) -> tuple[Array, Array]:
    """Returns F15, max-min: of each group the row of the highest reward is preferred to that of the lowest.

    Of equal rewards the first row is taken (E11). No pair where the two differ by `margin` or less, so that a group of
    equal rewards has none.

    Args:
      reward: [N] float; invalid entries may be NaN. group: [N] int32 in 0..num_groups-1. valid: [N] bool.
      margin: at least 0.

    Returns:
      label [N] float32, 1: preferred, 0: not; unit [N] int32, the group of a pair's rows, -1 for all others.

    Source: RLHF Workflow, 2405.07863, which also drops pairs of one text: here they tie, unless a judge that samples
    tells them apart.
    """
    static = {"num_groups": num_groups}
    best = groups.first_highest(reward, group, valid, **static)
    return _pairs(reward, group, best, groups.first_highest(-reward, group, valid, **static), margin=margin, **static)


def feasible_against_infeasible(
    reward: Array, group: Array, valid: Array, feasible: Array, *, num_groups: int
) -> tuple[Array, Array]:
    """Returns R13's pairs, CODPO: of each group the feasible row of the highest reward is preferred to the infeasible
    row of the lowest; where all are feasible, to the row of the lowest reward.

    No pair without a feasible row, nor where all rows are feasible and have one reward. Of equal rewards the first row
    is taken (E11).

    Args:
      feasible: [N] bool, anything where not valid.

    The rest as in `best_against_worst`, without a margin: an infeasible row is the worse one whatever its reward.

    Source: CGPO, 2409.20370 section 4.2.
    """
    static = {"num_groups": num_groups}
    best = groups.first_highest(reward, group, valid & feasible, **static)
    failed = valid & ~feasible
    some_failed = groups.to_rows(groups.count(group, failed, **static) > 0, group)
    worst = groups.first_highest(-reward, group, jnp.where(some_failed, failed, valid), **static)
    there = lambda rows: groups.to_rows(groups.count(group, rows, **static) > 0, group)
    apart = some_failed | groups.to_rows(groups.varied(reward, group, valid, **static), group)
    pair = there(best) & there(worst) & apart
    return (best & pair).astype(jnp.float32), jnp.where((best | worst) & pair, group, -1)


def best_two(reward: Array, group: Array, valid: Array, *, num_groups: int, margin: float) -> tuple[Array, Array]:
    """Returns F15, max-max: of each group the row of the highest reward is preferred to the next one.

    Both are good, so that the difference is small, and no pair where the best two tie. Arguments and results as in
    `best_against_worst`.
    """
    static = {"num_groups": num_groups}
    best = groups.first_highest(reward, group, valid, **static)
    return _pairs(
        reward, group, best, groups.first_highest(reward, group, valid & ~best, **static), margin=margin, **static
    )


def best_against_random(
    reward: Array, group: Array, valid: Array, draw: Array, *, num_groups: int, margin: float
) -> tuple[Array, Array]:
    """Returns F15, max-random: of each group the row of the highest reward is preferred to one of its others.

    Args:
      draw: [N] float, uniform and independent of the rewards: of the others, the row of the highest draw is taken.

    The rest as in `best_against_worst`.
    """
    static = {"num_groups": num_groups}
    best = groups.first_highest(reward, group, valid, **static)
    return _pairs(
        reward, group, best, groups.first_highest(draw, group, valid & ~best, **static), margin=margin, **static
    )


def tournament(
    preference: Array, group: Array, sample: Array, valid: Array, *, num_groups: int, margin: float
) -> tuple[Array, Array]:
    """Returns F15 by a tournament: every two rows of a group meet, and the row of the most wins is preferred to that of
    the fewest. No pair where the two differ by `margin` or less, as where every row beats another in a circle.

    Args:
      preference: [N, S] float, [i, s] the probability that row i is better than sample s of its group, as a pair model
        or a judge gives it, NaN where it gives none. Both orders are read: the wins of i over j are the mean of its own
        number and 1 less that of j, so that a judge's liking for a place cancels.
      sample: [N] int32 in 0..S-1, the row's place in its group.
      margin: at least 0, of the mean share of wins.

    The rest as in `best_against_worst`.

    Source: RLHF Workflow, 2405.07863, whose pair model ranks by such a tournament.
    """
    share = win_share(preference, group, sample, valid, valid, num_groups=num_groups)
    return best_against_worst(share, group, valid, num_groups=num_groups, margin=margin)


def _pairs(
    reward: Array, group: Array, preferred: Array, other: Array, *, num_groups: int, margin: float
) -> tuple[Array, Array]:
    """Returns (label, unit) of one pair a group where the rewards differ by more than `margin`.

    Args:
      preferred, other: [N] bool, at most one row of each group.
    """
    total = lambda rows: groups.total(jnp.where(rows, reward, 0), group, rows, num_groups=num_groups)
    there = lambda rows: groups.count(group, rows, num_groups=num_groups) > 0
    apart = (total(preferred) - total(other) > margin) & there(preferred) & there(other)
    apart = groups.to_rows(apart, group)
    return (preferred & apart).astype(jnp.float32), jnp.where((preferred | other) & apart, group, -1)
