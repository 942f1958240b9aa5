"""RLOO: a leave-one-out baseline, the mean reward of the prompt's other samples; PPO's clip; the mean of token sums.

    A_i = R_i - mean of the other rewards of the group                                       A5
    l_t = max(-rho_t * A_i, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_i)                  L2 (L3)
    L   = mean over sequences of the sum over their tokens                                   G3

The baseline is unbiased, unlike the group's mean, which includes the reward itself. The sum over tokens makes the
gradient that of the sequence's log-prob. Step sizes follow the scale of the rewards and the length of the answers.

Source: Ahmadian et al. 2402.14740, whose loss is REINFORCE on whole sequences; with one update per batch this is the
same. TRL clips the ratio of whole sequences, verl and Tunix that of tokens, as here. No KL in the reward.
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
class RLOO(common.Clipped):
    pass


def advantages(config: RLOO, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    row = advantage_ops.leave_one_out(reward, groups.group, contract.eligible(groups), num_groups=groups.num_groups)
    return advantage_ops.spread(row, groups.action_mask), state, common.count_groups(groups, reward)


OBJECTIVE = common.CLIPPED._replace(
    config=RLOO,
    advantages=advantages,
    denominator=lambda config, loss_mask, rows, max_completion: reduce.count_sequences(loss_mask),
)
