"""Lite-PPO: rewards minus the group's mean, divided by the batch's std; PPO's clip; the mean over tokens.

    A_i = (R_i - mean_g) / (std of all rewards of the step + 1e-6)                           A9
    l_t = max(-rho_t * A_i, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_i)                  L2 (L3)
    L   = mean over all tokens of the step                                                   G1

Two differences from GRPO: groups of nearly equal rewards cannot make the std small, and all tokens have the same weight
whatever the length of their answer. No value head, no KL.

Source: Liu et al. 2508.08221, "Tricks or Traps?".
"""

from __future__ import annotations

import jax

from jrl.algos import common, contract
from jrl.algos.contract import Groups
from jrl.ops import advantages as advantage_ops
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class LitePPO(common.Clipped):
    pass


def advantages(config: LitePPO, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    row = advantage_ops.group_mean_batch_std(
        reward, groups.group, contract.eligible(groups), num_groups=groups.num_groups
    )
    return advantage_ops.spread(row, groups.action_mask), state, common.count_groups(groups, reward)


OBJECTIVE = common.CLIPPED._replace(config=LitePPO, advantages=advantages)
