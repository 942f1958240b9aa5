"""REINFORCE++: returns whitened over all tokens of the batch, without groups; PPO's clip; the mean over tokens.

    r_t = R_i on the last sampled token, 0 before; rewards of spans on theirs; -kl_in_reward * k_t         R16, R17
    A_t = (Ret_t - mean) / std over all sampled tokens of the step, Ret_t = r_t + discount * Ret_t'        A7, A1
    l_t = max(-rho_t * A_t, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_t)                               L2 (L3)
    L   = mean over all tokens of the step                                                                 G1

One sample per prompt is enough. The baseline is the batch's, so prompts that are always answered wrong push down all
their samples, and those always answered right push them up.

Source: Hu 2501.03262, with the KL on.
"""

from __future__ import annotations

from typing import Literal

import jax

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups
from jrl.ops import advantages as advantage_ops
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class ReinforcePlusPlus(common.Clipped):
    discount: float = 1.0  # gamma, by sampled token
    kl_in_reward: float | None = None  # coefficient of the KL to the reference in the reward; None: no reference
    kl_in_reward_estimator: Literal["k1", "k2", "k3"] = "k1"  # of that KL, token by token


def check(config: ReinforcePlusPlus, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=False)
    common.check_clip(config)
    common.check_importance(config)
    common.check_entropy(config)
    common.check_kl_in_reward(config)
    if not 0 < config.discount <= 1:
        raise ValueError(
            f"ReinforcePlusPlus.discount = {config.discount} must lie in (0, 1]. 1.0 is usual: an answer ends anyway."
        )


def advantages(
    config: ReinforcePlusPlus, groups: Groups, reward: Array, state: PyTree
) -> tuple[Array, PyTree, dict[str, Array]]:
    rewards, counts = common.rewards_of_tokens(config, groups, reward), contract.eligible(groups)
    whitened = advantage_ops.whitened_returns(rewards, groups.action_mask, counts, discount=config.discount)
    return whitened, state, common.count_groups(groups, reward)


OBJECTIVE = common.CLIPPED._replace(
    config=ReinforcePlusPlus,
    check=check,
    advantages=advantages,
    needs=lambda config: common.entropy_needs(config)._replace(**common.needs_of_reward(config)),
)
