"""OPO: rewards minus the length-weighted mean of their group, the minimum-variance baseline; PPO's clip.

    A_i = R_i - sum(len_j * R_j) / sum(len_j) over the group                                 A10
    l_t = max(-rho_t * A_i, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_i)                  L2 (L3)
    L   = mean over all tokens of the step                                                   G1

The weights stand for the squared norm of a sequence's gradient, which grows with its length. Step sizes follow the
scale of the rewards.

Source: Hao et al. 2505.23585, which is strictly on policy: one update per batch, where the clip never binds, no KL and
no entropy bonus.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, contract
from jrl.algos.contract import Groups
from jrl.ops import advantages as advantage_ops
from jrl.ops import baselines
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class OPO(common.Clipped):
    pass


def advantages(config: OPO, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    length = jnp.sum(groups.action_mask, axis=-1)
    row = baselines.length_weighted(
        reward, length, groups.group, contract.eligible(groups), num_groups=groups.num_groups
    )
    return advantage_ops.spread(row, groups.action_mask), state, common.count_groups(groups, reward)


OBJECTIVE = common.CLIPPED._replace(config=OPO, advantages=advantages)
