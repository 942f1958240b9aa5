"""Dr.GRPO: GRPO without its two biases. Rewards are only centered, and tokens are summed over a constant.

    A_i = R_i - mean_g                                                                       A4
    l_t = max(-rho_t * A_i, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_i)                  L2 (L3)
    L   = sum of l_t / (rows of the step * longest completion)                                G4

Dividing by the standard deviation favors prompts that are nearly all right or all wrong; dividing by a row's length
makes long wrong answers cheap. The constant is configured, not measured: masked rows count, padding does not. Step
sizes follow the scale of the rewards.

Source: Liu et al. 2503.20783 section 3.3. No KL term, as in the paper.
"""

from __future__ import annotations

import jax

from jrl.algos import common, contract
from jrl.algos.contract import Groups
from jrl.ops import advantages as advantage_ops
from jrl.ops import reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class DrGRPO(common.Clipped):
    pass


def advantages(config: DrGRPO, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    row = advantage_ops.group_centered(reward, groups.group, contract.eligible(groups), num_groups=groups.num_groups)
    return advantage_ops.spread(row, groups.action_mask), state, common.count_groups(groups, reward)


OBJECTIVE = common.CLIPPED._replace(
    config=DrGRPO,
    advantages=advantages,
    denominator=lambda config, loss_mask, rows, max_completion: reduce.constant_count(rows, max_completion),
)
