"""PassAtK: maximize the chance of a right answer among k samples instead of the mean accuracy (PKPO).

    A_i = n^2 / (n - k) * a_i, a_i the credit of a correct or a wrong row among n with c correct ones   A11
    l_t = max(-rho_t * A_i, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_i)                            L2 (L3)
    L   = mean over sequences of the sum over their tokens                                             G3

A row is correct if its reward is above `threshold`. With this scale L has the gradient of the mean pass@k over prompts,
and k = 1 is RLOO. Wrong answers share the credit of the right ones that they may be drawn with, so the policy keeps
exploring. A prompt with more than n - k right answers of n has no gradient, so the mean reward stays below that of
other objectives.

Source: Walder and Karkhanis 2505.15201. We subtract the group's mean; their baseline is leave-one-out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups
from jrl.ops import advantages as advantage_ops
from jrl.ops import best_of_k, reduce
from jrl.ops import groups as group_ops
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class PassAtK(common.Clipped):
    k: int = 4  # samples of which one has to be right; below Online.samples
    threshold: float = 0.5  # a reward above it is right


def check(config: PassAtK, facts: Facts) -> None:
    common.check_clipped(config, facts)
    if not 1 <= config.k < facts.samples:
        raise ValueError(
            f"PassAtK.k = {config.k} must be 1 to {facts.samples - 1}, fewer than the {facts.samples} samples of a "
            "prompt: with all of them drawn, every sample has one credit and nothing is learned. A quarter of the "
            "samples is usual, 4 of 16."
        )


def advantages(config: PassAtK, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    counts, num_groups = contract.eligible(groups), groups.num_groups
    size = group_ops.to_rows(group_ops.count(groups.group, counts, num_groups=num_groups), groups.group)
    correct = reward > config.threshold
    credit = best_of_k.pass_at_k(correct, groups.group, counts, num_groups=num_groups, k=config.k)
    row = credit * (size * size) / jnp.maximum(size - config.k, 1)
    row = row.astype(reduce.widen(reward).dtype)
    return advantage_ops.spread(row, groups.action_mask), state, common.count_groups(groups, reward)


OBJECTIVE = common.CLIPPED._replace(
    config=PassAtK,
    check=check,
    advantages=advantages,
    denominator=lambda config, loss_mask, rows, max_completion: reduce.count_sequences(loss_mask),
)
