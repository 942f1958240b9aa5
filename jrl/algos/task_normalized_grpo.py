"""GRPO on several tasks at once: advantages are centered by prompt, and in standard deviations of their task.

    d_i  = R_i - mean_g                                                                      A4
    A_it = (d_i - mean_k) / sqrt(var_k + 1e-8), over the sampled tokens of the task's rows    A23
    l_t  = max(-rho_t * A_it, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_it)               L2 (L3)
    L    = mean over all tokens of the step                                                  G1

Rewards of tasks may differ in scale and in spread: a task whose rewards are ten times as large moves the policy no
further than another one. GRPO's division by a prompt's own deviation does that too, and favors prompts that are nearly
all right or all wrong; whitening over the whole step lets the task of large rewards drown the others. Of a single task
it is whitening over the step. Where rows differ in length the mean of a task's tokens is not 0, so that prompts without
a signal have a small advantage too. A task is what examples call it (`Example.task`): files of one name are one task
unless `Jsonl.task` or `Dataset.task` tells them apart (the run's first lines count `task_of_same_name`). Tasks are told
apart by a 32-bit hash of the name.

Source: task advantage normalization of AgentRL, Zhang et al. 2510.04206, which normalizes advantages that GRPO has
divided by the prompt's deviation; here they are normalized once.
"""

from __future__ import annotations

import jax

from jrl.algos import common, contract
from jrl.algos.contract import Groups, Objective
from jrl.ops import advantages as advantage_ops
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class TaskNormalizedGRPO(common.Clipped):
    """GRPO with advantages in standard deviations of their task."""


def advantages(
    config: TaskNormalizedGRPO, groups: Groups, reward: Array, state: PyTree
) -> tuple[Array, PyTree, dict[str, Array]]:
    counts, static = contract.eligible(groups), dict(num_groups=groups.num_groups)
    row = advantage_ops.group_centered(reward, groups.group, counts, **static)
    tokens = advantage_ops.spread(row, groups.action_mask)
    mask = groups.action_mask & counts[:, None]
    found = advantage_ops.whiten_by_task(tokens, groups.task, mask, num_tasks=groups.num_groups)
    return found, state, common.count_groups(groups, reward)


OBJECTIVE = Objective(
    config=TaskNormalizedGRPO,
    check=common.check_clipped,
    corrects_staleness=common.has_importance,
    advantages=advantages,
    token_loss=common.clipped_token_loss,
    needs=lambda config: common.entropy_needs(config)._replace(task=True),
)
