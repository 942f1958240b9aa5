"""On-policy distillation: a teacher's log-probs of the policy's samples are the rewards of their tokens.

    A_t = log teacher(y_t | y_<t) - old_logprobs_t                                           P37
    l_t = max(-rho_t * A_t, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_t)                 L2 (L3)
    L   = mean over all tokens of the step                                                   G1

The teacher is the role `teacher`, trained by an earlier stage. The reward is not used, but rows without a valid verdict
are still left out. In expectation the gradient is that of KL(policy, teacher) at every state of the policy; GKD
computes that divergence over the whole vocabulary, at a higher cost and with less noise.

Source: prime-rl and tinker, where the estimate replaces the reward, with coefficient 1. AReaL uses it as the loss,
where its mean gradient is zero (K2).
"""

from __future__ import annotations

import jax

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups, Needs
from jrl.ops import divergence, reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class OnPolicyDistillation(common.Clipped):
    pass


def check(config: OnPolicyDistillation, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=False)
    common.check_unshaped(config, facts, reads="the teacher")
    common.check_clip(config)
    common.check_importance(config)
    common.check_entropy(config)


def advantages(
    config: OnPolicyDistillation, groups: Groups, reward: Array, state: PyTree
) -> tuple[Array, PyTree, dict[str, Array]]:
    counts = groups.action_mask & contract.eligible(groups)[:, None]
    gap = divergence.teacher_advantage(groups.old_logprobs, groups.teacher_logprobs, counts)
    counters = common.count_groups(groups, reward)
    return gap, state, counters | {"teacher_gap": reduce.masked_mean(gap, counts)}


OBJECTIVE = common.CLIPPED._replace(
    config=OnPolicyDistillation,
    check=check,
    needs=lambda config: Needs(teacher=True, credit_logprobs=True, entropy_gradient=config.entropy_bonus is not None),
    advantages=advantages,
)
