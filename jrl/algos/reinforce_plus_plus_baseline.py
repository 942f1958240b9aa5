"""REINFORCE++-baseline: rewards minus their group's mean, whitened over the batch; PPO's clip; a KL to the reference.

    A_t = (R_i - mean_g), whitened over all sampled tokens of the step                                     A8
    l_t = max(-rho_t * A_t, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_t) + kl * (lp_t - ref_t)^2 / 2    L2 (L3), K2
    L   = mean over all tokens of the step                                                                 G1

The std is the batch's, so a group in which a single answer differs is not amplified as in GRPO. The KL is in the loss,
with the estimator whose gradient is that of the reverse KL.

Source: Hu 2501.03262; verl and OpenRLHF. The coefficient is ours.
"""

from __future__ import annotations

import jax

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups, Needs, Objective, Tokens
from jrl.ops import advantages as advantage_ops
from jrl.ops import kl
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class ReinforcePlusPlusBaseline(common.Clipped):
    kl: float | None = 1e-3  # coefficient of the KL to the reference (k2) in the loss; None: no reference is loaded


def check(config: ReinforcePlusPlusBaseline, facts: Facts) -> None:
    common.check_clipped(config, facts)
    if config.kl is not None and not config.kl > 0:
        raise ValueError(
            f"ReinforcePlusPlusBaseline.kl = {config.kl} must be above 0, or None: at 0 a reference would be loaded "
            "and run for nothing. 0.001 is usual."
        )


def advantages(
    config: ReinforcePlusPlusBaseline, groups: Groups, reward: Array, state: PyTree
) -> tuple[Array, PyTree, dict[str, Array]]:
    whitened = advantage_ops.whitened_centered(
        reward, groups.group, contract.eligible(groups), groups.action_mask, num_groups=groups.num_groups
    )
    return whitened, state, common.count_groups(groups, reward)


def token_loss(config: ReinforcePlusPlusBaseline, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    loss, metrics = common.clipped_token_loss(config, tokens, state)
    if config.kl is not None:
        loss = loss + config.kl * kl.k2(tokens.logprobs, tokens.ref_logprobs, tokens.mask)
    return loss, metrics


OBJECTIVE = Objective(
    config=ReinforcePlusPlusBaseline,
    check=check,
    corrects_staleness=common.has_importance,
    advantages=advantages,
    token_loss=token_loss,
    needs=lambda config: Needs(reference=config.kl is not None, entropy_gradient=config.entropy_bonus is not None),
)
