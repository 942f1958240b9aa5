"""R13: rewards that count only if constraints hold, as in CGPO's mixture of judges.

    Rc = sigmoid(r(y) - r(baseline answer));   Rcr = Rc if every judge is satisfied, else 0
    Rt = max(1 - (log pi(y) - log pi_ref(y)) / KLmax, 0) * Rcr

A judge without a verdict is not satisfied; the caller masks such rows (E3).

Source: CGPO, 2409.20370.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import groups, reduce

Array = jax.Array


def satisfied(values: Array, *, least: float) -> Array:
    """Returns R13's feasibility: every constraint's value is at least `least`. False if one is NaN.

    Args:
      values: [K, N] float.

    Returns: [N] bool; True where K is 0.
    """
    return jnp.all(values >= least, axis=0)


def calibrated_reward(score: Array, baseline_score: Array) -> Array:
    """Returns R13's Rc, sigmoid(score - baseline_score), in (0, 1): 0.5 for an answer as good as the baseline.

    Args:
      score: [N] float. baseline_score: [N] float, of the baseline answer to the same prompt.
    """
    return jax.nn.sigmoid(reduce.widen(score) - baseline_score)


def constrained_reward(reward: Array, feasible: Array, *, infeasible_reward: float) -> Array:
    """Returns R13's Rcr: the reward where feasible, else `infeasible_reward`; [N] float32 or wider.

    Args:
      reward: [N] float. feasible: [N] bool. infeasible_reward: 0 in CGPO, whose other rewards are in (0, 1).
    """
    return jnp.where(feasible, reduce.widen(reward), infeasible_reward)


def kl_bounded_reward(
    reward: Array, old_logprobs: Array, ref_logprobs: Array, action_mask: Array, *, limit: float
) -> Array:
    """Returns R13's Rt: max(1 - d / limit, 0) * reward, d the sum of log-ratios of the row's sampled tokens.

    A row as likely as under the reference keeps its reward; it falls linearly with d, to 0 at d = limit. A row that is
    less likely than under the reference gets more.

    Args:
      reward: [N] float. old_logprobs, ref_logprobs: [N, T] float, of the weights that sampled and of the reference.
      action_mask: [N, T] bool. limit: nats, above 0.

    Returns: [N] float32 or wider, without gradient.
    """
    bound = jnp.maximum(1 - moved(old_logprobs, ref_logprobs, action_mask) / limit, 0)
    return jax.lax.stop_gradient(bound * reward)


def moved(old_logprobs: Array, ref_logprobs: Array, action_mask: Array) -> Array:
    """Returns R13's log pi(y) - log pi_ref(y), the sum of log-ratios of the row's sampled tokens, [N] float32 or wider.

    Args:
      old_logprobs, ref_logprobs: [N, T] float. action_mask: [N, T] bool.
    """
    return (reduce.masked(old_logprobs, action_mask) - reduce.masked(ref_logprobs, action_mask)).sum(axis=1)


def baseline_score(score: Array, baseline: Array, group: Array, *, num_groups: int) -> tuple[Array, Array]:
    """Returns R13's r(x, ybar), the score of the baseline answer of each row's group, [N] float32 or wider, and whether
    there is one, [N] bool.

    Args:
      score: [N] float; unused outside `baseline`. baseline: [N] bool, at most one scored row per group.
    """
    present = groups.count(group, baseline, num_groups=num_groups) > 0
    group_score = groups.total(score, group, baseline, num_groups=num_groups)
    return groups.to_rows(group_score, group), groups.to_rows(present, group)


def best_feasible(
    score: Array, allowed: Array, fallback: Array, group: Array, sample: Array, *, num_groups: int
) -> Array:
    """Returns R13's weights of the answers that CRRAFT imitates, [N] float32 or wider: 1 on the allowed row with the
    highest score of its group, at ties the lowest sample; if none is allowed, 1 on the group's fallback row, if any; 0
    elsewhere.

    Args:
      score: [N] float. allowed: [N] bool, feasible and near enough to the reference. fallback: [N] bool, at most one
        row per group: the baseline answer, if it is feasible. sample: [N] int32, the row's sample index in its group.
    """
    score = reduce.widen(score)
    some = groups.to_rows(groups.count(group, allowed, num_groups=num_groups), group) > 0
    best = allowed & (score == groups.to_rows(groups.maximum(score, group, allowed, num_groups=num_groups), group))
    best = groups.first_sample(best, group, sample, num_groups=num_groups)
    return jnp.where(some, best, fallback).astype(score.dtype)
