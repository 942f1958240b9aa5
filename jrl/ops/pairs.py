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
    """Returns F15, max-min: the row of each group with the highest reward is preferred to the one with the lowest.

    At ties the first row is taken (E11). No pair if the two differ by `margin` or less, so a group of equal rewards has
    none.

    Args:
      reward: [N] float; invalid entries may be NaN. group: [N] int32 in 0..num_groups-1. valid: [N] bool.
      margin: at least 0.

    Returns:
      label [N] float32, 1: preferred, 0: not; unit [N] int32, the group of a pair's rows, -1 for all others.

    Source: RLHF Workflow, 2405.07863, which also drops pairs of identical texts: here they tie, unless a judge that
    samples gives them different rewards.
    """
    static = {"num_groups": num_groups}
    best = groups.first_highest(reward, group, valid, **static)
    return _pairs(reward, group, best, groups.first_highest(-reward, group, valid, **static), margin=margin, **static)


def feasible_against_infeasible(
    reward: Array, group: Array, valid: Array, feasible: Array, *, num_groups: int
) -> tuple[Array, Array]:
    """Returns R13's pairs, CODPO: the feasible row of each group with the highest reward is preferred to the infeasible
    row with the lowest; if all are feasible, to the row with the lowest reward.

    No pair without a feasible row, or if all rows are feasible and have equal rewards. At ties the first row is taken
    (E11).

    Args:
      feasible: [N] bool, unused where not valid.

    The rest as in `best_against_worst`, without a margin: an infeasible row is worse whatever its reward.

    Source: CGPO, 2409.20370 section 4.2.
    """
    static = {"num_groups": num_groups}
    best = groups.first_highest(reward, group, valid & feasible, **static)
    failed = valid & ~feasible
    some_failed = groups.to_rows(groups.count(group, failed, **static) > 0, group)
    worst = groups.first_highest(-reward, group, jnp.where(some_failed, failed, valid), **static)
    present = lambda rows: groups.to_rows(groups.count(group, rows, **static) > 0, group)
    differ = some_failed | groups.to_rows(groups.varied(reward, group, valid, **static), group)
    pair = present(best) & present(worst) & differ
    return (best & pair).astype(jnp.float32), jnp.where((best | worst) & pair, group, -1)


def best_two(reward: Array, group: Array, valid: Array, *, num_groups: int, margin: float) -> tuple[Array, Array]:
    """Returns F15, max-max: the row of each group with the highest reward is preferred to the second highest.

    Both are good, so the difference is small; no pair if the best two tie. Arguments and results as in
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
    """Returns F15, max-random: the row of each group with the highest reward is preferred to a random other row.

    Args:
      draw: [N] float, uniform and independent of the rewards; the other row with the highest draw is taken.

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
    """Returns F15 by a tournament: all rows of a group are compared pairwise, and the row with the most wins is
    preferred to the one with the fewest. No pair if the two differ by `margin` or less, for example if preferences are
    cyclic.

    Args:
      preference: [N, S] float, [i, s] the probability that row i is better than sample s of its group, from a pair
        model or a judge, NaN if there is none. Both orders are used: the wins of i over j are the mean of i's
        preference and 1 minus j's, so that a judge's position bias cancels.
      sample: [N] int32 in 0..S-1, the row's sample index in its group.
      margin: at least 0, of the mean share of wins.

    The rest as in `best_against_worst`.

    Source: RLHF Workflow, 2405.07863, whose pair model ranks by such a tournament.
    """
    share = win_share(preference, group, sample, valid, valid, num_groups=num_groups)
    return best_against_worst(share, group, valid, num_groups=num_groups, margin=margin)


def _pairs(
    reward: Array, group: Array, preferred: Array, other: Array, *, num_groups: int, margin: float
) -> tuple[Array, Array]:
    """Returns (label, unit) of one pair per group, if the rewards differ by more than `margin`.

    Args:
      preferred, other: [N] bool, at most one row of each group.
    """
    total = lambda rows: groups.total(jnp.where(rows, reward, 0), group, rows, num_groups=num_groups)
    present = lambda rows: groups.count(group, rows, num_groups=num_groups) > 0
    paired = (total(preferred) - total(other) > margin) & present(preferred) & present(other)
    paired = groups.to_rows(paired, group)
    return (preferred & paired).astype(jnp.float32), jnp.where((preferred | other) & paired, group, -1)
