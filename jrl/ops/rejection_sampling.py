"""Which samples of a prompt are good enough to imitate: best of n (RAFT) and a threshold (expert iteration).

Both return the weight of a row in a likelihood loss, -weight * logprobs; 0 leaves the row out. Among
equally good rows the first samples of a prompt are taken (E11), whatever the order of rows: samples are exchangeable
(with `Branching`, stems come first), and a mean over the kept tokens is as large however many tie. Of identical answers
to a prompt the first is taken.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import groups, reduce

Array = jax.Array


def best_of_group(reward: Array, group: Array, sample: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns L14 for RAFT: 1 on the best row of each group, at ties on the first sample; 0 elsewhere.

    A group whose rewards are all equal has no best row and is left out, as is a group of one.

    Args:
      reward: [N] float; invalid entries may be NaN. group: [N] int32 in 0..num_groups-1. valid: [N] bool.
      sample: [N] int32, at least 0, the row's sample index in its group.

    Returns:
      [N] float32 or wider.

    Source: Dong et al. 2304.06767, 8 to 32 samples a prompt.
    """
    reward = reduce.widen(reward)
    top = groups.to_rows(groups.maximum(reward, group, valid, num_groups=num_groups), group)
    varied = groups.to_rows(groups.varied(reward, group, valid, num_groups=num_groups), group)
    best = valid & varied & (reward == top)
    return groups.first_sample(best, group, sample, num_groups=num_groups).astype(reward.dtype)


def above_threshold(
    reward: Array,
    group: Array,
    sample: Array,
    valid: Array,
    tokens: Array,
    action_mask: Array,
    *,
    num_groups: int,
    threshold: float,
    max_kept: float,
) -> Array:
    """Returns L14 for expert iteration: 1 on every different answer whose reward is at least the threshold; if a group
    has more than max_kept of them, on the first max_kept only, so that easy prompts do not dominate; 0 elsewhere.

    Answers are identical if all tokens are up to the last that the policy sampled, those of others before it too: with
    `Branching`, the same end of two different answers is not the same answer.

    Args:
      reward, group, sample, valid: as in `best_of_group`. tokens: [N, T] int32, may be anything after the last
        action. action_mask: [N, T] bool. max_kept: at least 1, rows of a prompt that are imitated.

    Returns:
      [N] float32 or wider.

    Source: rejection sampling as in Xin et al. 2405.14333 (DeepSeek-Prover).
    """
    reward = reduce.widen(reward)
    good = valid & (reward >= threshold)
    before_end = jax.lax.cummax(action_mask.astype(jnp.int32), axis=1, reverse=True) > 0
    answer = jnp.where(before_end, tokens, -1)
    _, _, kept = jax.lax.while_loop(
        lambda carry: (carry[0] < max_kept) & carry[1].any(),
        lambda carry: _keep_one(*carry, answer, group, sample, num_groups),
        (jnp.zeros((), jnp.int32), good, jnp.zeros_like(good)),
    )
    return kept.astype(reward.dtype)


def _keep_one(
    number: Array, left: Array, kept: Array, answer: Array, group: Array, sample: Array, num_groups: int
) -> tuple[Array, Array, Array]:
    """Moves the first remaining sample of every group to `kept`, and leaves out those with its answer.

    Returns (rows kept per prompt so far, left, kept).
    """
    first = groups.first_sample(left, group, sample, num_groups=num_groups)
    return number + 1, left & ~groups.same_as(answer, first, group, num_groups=num_groups), kept | first
