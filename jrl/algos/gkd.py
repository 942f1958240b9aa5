"""GKD: the policy learns a teacher's distribution at the states of its own samples.

    l_t = D(policy, teacher) at the state before a sampled y_t, over the whole vocabulary    P37
    L   = mean over all sampled tokens of the step                                           G1

No gradient goes through the sampling. D is the reverse KL by default. The teacher is the role `teacher`, trained by an
earlier stage. The reward is not used, but rows without a valid verdict are still left out.

Source: Agarwal et al. 2306.13649 with a student fraction of 1. Below 1 the rest there is stored text, for which use
Distillation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, distillation
from jrl.algos.contract import Facts, Groups, Needs, Objective, Tokens
from jrl.ops import reduce
from jrl.ops.divergence import Divergence
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class GKD:
    divergence: Divergence = "reverse"  # from the teacher: forward is KL(teacher, policy), reverse KL(policy, teacher)
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus


def check(config: GKD, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=False)
    common.check_entropy(config)
    common.check_unshaped(config, facts, reads="the teacher")
    distillation.check_divergence("GKD", config.divergence)


def advantages(config: GKD, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    """Returns 0 for every token: the loss uses no advantages."""
    zeros = jnp.zeros(groups.action_mask.shape, reduce.widen(reward).dtype)
    return zeros, state, common.count_groups(groups, reward)


def token_loss(config: GKD, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P37, the divergence from the teacher at every token, [..., L], 0 where masked; and the metrics."""
    loss, metrics = distillation.token_loss(config, tokens, state)
    return common.unweighted_loss(config, loss, tokens, metrics)


OBJECTIVE = Objective(
    config=GKD,
    check=check,
    corrects_staleness=lambda config: True,
    needs=lambda config: Needs(divergence=config.divergence, entropy_gradient=config.entropy_bonus is not None),
    advantages=advantages,
    token_loss=token_loss,
)
