"""Advantages relative to a baseline per prompt other than the plain mean of its samples. Nothing carries a gradient.

Rows are [N], `valid` marks those that count; see jrl.ops.advantages.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import groups, reduce

Array = jax.Array

COLUMNS = 64  # whose baselines are computed at once


def greedy_baseline(reward: Array, greedy: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns A6, ReMax: R_i - R of the greedy completion of the same prompt.

    The greedy row itself gets 0: it is never trained on. So do the rows of a prompt whose greedy completion has no
    valid verdict.

    Args:
      reward: [N] float; invalid entries may be NaN. greedy: [N] bool, the greedy row of each group.
      group: [N] int32. valid: [N] bool.

    Returns:
      [N] float32 or wider.

    Source: Li et al. 2310.10505; verl.
    """
    baselines = valid & greedy
    has_baseline = groups.to_rows(groups.count(group, baselines, num_groups=num_groups) > 0, group)
    baseline = groups.to_rows(groups.mean(reward, group, baselines, num_groups=num_groups), group)
    return jnp.where(valid & ~greedy & has_baseline, reduce.masked(reward, valid) - baseline, 0)


def length_weighted(reward: Array, length: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns A10, OPO: R_i - sum(len_j R_j) / sum(len_j) over the group.

    The minimum-variance baseline if the squared gradient norm of a row is proportional to its length. A group whose
    rewards are all equal gets exactly 0, and so does a group of one.

    Args:
      reward: [N] float; invalid entries may be NaN. length: [N] int32, sampled tokens; rows without any are left out.
      group: [N] int32. valid: [N] bool.

    Returns:
      [N] float32 or wider.

    Source: Hao et al. 2505.23585; verl.
    """
    valid = valid & (length > 0)
    weighted = groups.total(reduce.masked(reward, valid) * length, group, valid, num_groups=num_groups)
    tokens = groups.total(length, group, valid, num_groups=num_groups)
    varied = groups.to_rows(groups.varied(reward, group, valid, num_groups=num_groups), group)
    baseline = groups.to_rows(weighted / jnp.maximum(tokens, 1), group)
    return jnp.where(valid & varied, reduce.masked(reward, valid) - baseline, 0)


def token_optimal(
    returns: Array,
    probability: Array,
    sum_squared: Array,
    action_mask: Array,
    group: Array,
    valid: Array,
    *,
    num_groups: int,
) -> Array:
    """Returns A10, OTB: Ret_t - b_t, with a separate baseline for every column of a group,

        b_t = sum_j Ret_jt W_jt / sum_j W_jt,  W_jt = sum over the sampled tokens up to t of 1 - 2 p(y) + sum_v p_v^2

    over the rows j of the group that sampled a token there. W estimates the squared gradient norm so far: with respect
    to the logits, a token's is 1 - 2 p(y) + sum_v p_v^2. A group shares its prompt, so columns are aligned. A column
    with a single row, equal returns or zero weights gets 0.

    Args:
      returns: [N, T] float (A1). probability: [N, T] float, p(y_t) of the sampled token.
      sum_squared: [N, T] float, sum over the vocabulary of p_v^2. action_mask: [N, T] bool. group: [N] int32.
      valid: [N] bool.

    Returns:
      [N, T] float32 or wider, 0 where not an action.

    Source: verl's optimal token baseline.
    """
    counts = action_mask & valid[:, None]
    # Of a certain token rounding may leave less than 0, and weights of both signs would put the baseline anywhere.
    norm = jnp.maximum(1 - 2 * reduce.masked(probability, counts) + reduce.masked(sum_squared, counts), 0)
    weights = jnp.cumsum(jnp.where(counts, norm, 0), axis=-1)

    def of_column(returns: Array, weights: Array, counts: Array) -> Array:
        weight = groups.total(weights, group, counts, num_groups=num_groups)
        weighs = ~(weight <= 0)  # or NaN, which must stay
        weighted = groups.total(reduce.masked(returns, counts) * weights, group, counts, num_groups=num_groups)
        baseline = groups.to_rows(weighted / jnp.where(weighs, weight, 1), group)
        varied = groups.varied(returns, group, counts, num_groups=num_groups)
        compared = groups.to_rows(varied & weighs, group)
        return jnp.where(counts & compared, reduce.masked(returns, counts) - baseline, 0)

    # Some columns at a time: where comparisons with groups do not fuse, all of them would be [T, N, num_groups].
    columns = (returns.T, weights.T, counts.T)
    return jax.lax.map(lambda column: of_column(*column), columns, batch_size=COLUMNS).T
