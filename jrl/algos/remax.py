"""ReMax: the reward minus that of the policy's greedy answer to the same prompt.

    A_i = R_i - R of the greedy answer of the prompt; 0 if that has no valid verdict          A6
    l_t = max(-rho_t * A_i, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_i)                  L2 (L3)
    L   = mean over all tokens of the step                                                   G1

The first of a prompt's samples is the greedy one. It is scored but not trained on: 2 samples per prompt are enough, one
to train on and its baseline. `reward/mean` includes all of them.

Source: Li et al. 2310.10505, whose loss is REINFORCE; with one update per batch this is the same. verl clips, as here.
"""

from __future__ import annotations

import jax

from jrl.algos import common, contract
from jrl.algos.contract import Groups
from jrl.ops import advantages as advantage_ops
from jrl.ops import baselines
from jrl.ops import groups as group_ops
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class ReMax(common.Clipped):
    pass


def advantages(config: ReMax, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    row = baselines.greedy_baseline(
        reward, contract.greedy(groups), groups.group, contract.eligible(groups), num_groups=groups.num_groups
    )
    return advantage_ops.spread(row, groups.action_mask), state, common.count_groups(groups, reward)


def keep(config: ReMax, groups: Groups) -> Array:
    """Returns the sampled rows whose prompt's greedy answer was scored, [N] bool: the others have no baseline."""
    eligible, greedy = contract.eligible(groups), contract.greedy(groups)
    has_baseline = group_ops.count(groups.group, eligible & greedy, num_groups=groups.num_groups) > 0
    return eligible & ~greedy & group_ops.to_rows(has_baseline, groups.group)


OBJECTIVE = common.CLIPPED._replace(
    config=ReMax,
    keep=keep,
    advantages=advantages,
    needs=lambda config: common.entropy_needs(config)._replace(greedy_sample=True),
)
