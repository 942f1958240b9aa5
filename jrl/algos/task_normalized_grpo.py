"""GRPO on several tasks at once: advantages are centered per prompt and normalized per task.

    d_i  = R_i - mean_g                                                                      A4
    A_it = (d_i - mean_k) / sqrt(var_k + 1e-8), over the sampled tokens of the task's rows    A23
    l_t  = max(-rho_t * A_it, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_it)               L2 (L3)
    L    = mean over all tokens of the step                                                  G1

The rewards of tasks may differ in scale and spread: a task with rewards ten times as large moves the policy no further
than the others. GRPO's division by the prompt's std does that too, but favors prompts that are nearly all right or all
wrong; whitening over the whole step lets the task with the largest rewards drown the others. For a single task this is
whitening over the step. If rows differ in length, the mean over a task's tokens is not 0 before whitening, so prompts
without a signal get a small advantage too. Tasks are named by `Example.task`: files of the same name are one task
unless `Jsonl.task` or `Dataset.task` renames them (the run's first lines count `task_of_same_name`). Tasks are
identified by a 32-bit hash of the name.

Source: task advantage normalization of AgentRL, Zhang et al. 2510.04206, which normalizes advantages that GRPO has
already divided by the prompt's std; here they are normalized once.
"""

from __future__ import annotations

import jax

from jrl.algos import common, contract
from jrl.algos.contract import Groups
from jrl.ops import advantages as advantage_ops
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class TaskNormalizedGRPO(common.Clipped):
    """GRPO with advantages normalized per task."""


def advantages(
    config: TaskNormalizedGRPO, groups: Groups, reward: Array, state: PyTree
) -> tuple[Array, PyTree, dict[str, Array]]:
    counts = contract.eligible(groups)
    row = advantage_ops.group_centered(reward, groups.group, counts, num_groups=groups.num_groups)
    centered = advantage_ops.spread(row, groups.action_mask)
    mask = groups.action_mask & counts[:, None]
    whitened = advantage_ops.whiten_by_task(centered, groups.task, mask, num_tasks=groups.num_groups)
    return whitened, state, common.count_groups(groups, reward)


OBJECTIVE = common.CLIPPED._replace(
    config=TaskNormalizedGRPO,
    advantages=advantages,
    needs=lambda config: common.entropy_needs(config)._replace(task=True),
)
