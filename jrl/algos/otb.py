"""OTB: returns minus a minimum-variance baseline for every token position of a group; PPO's clip.

    r_t   = R_i on the last sampled token, 0 before; rewards of spans on theirs; -kl_in_reward * k_t     R16, R17
    Ret_t = sum of r from t on                                                                           A1
    W_t   = sum over the sampled tokens up to t of 1 - 2 p(y) + sum_v p_v^2
    A_t   = Ret_t - sum_j Ret_jt W_jt / sum_j W_jt over the rows of the group that sampled a token there  A10
    l_t   = max(-rho_t * A_t, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_t)                            L2 (L3)
    L     = mean over all tokens of the step                                                             G1

W estimates the squared gradient norm of a row's log-prob so far: the rows with the largest gradients dominate the
baseline. p is the distribution over the vocabulary under the weights before a batch's updates; computing it takes an
extra pass if a batch has one update. Positions that a single sample of the group reaches have advantage 0, so with a
reward at the end the longest sample is trained only up to the length of the second longest.

Source: verl's optimal token baseline, which has no clip of its own.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups, Needs
from jrl.ops import advantages as advantage_ops
from jrl.ops import baselines, reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class OTB(common.Clipped):
    kl_in_reward: float | None = None  # coefficient of the KL to the reference in the reward; None: no reference
    kl_in_reward_estimator: Literal["k1", "k2", "k3"] = "k1"  # of that KL, token by token


def check(config: OTB, facts: Facts) -> None:
    common.check_clipped(config, facts)
    common.check_kl_in_reward(config)


def needs(config: OTB) -> Needs:
    reward_needs = common.needs_of_reward(config)
    return common.entropy_needs(config)._replace(**reward_needs | {"credit_logprobs": True, "credit_sum_squared": True})


def advantages(config: OTB, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    rows, mask = contract.eligible(groups), groups.action_mask
    returns = advantage_ops.discounted_returns(common.rewards_of_tokens(config, groups, reward), mask, discount=1.0)
    token_advantages = baselines.token_optimal(
        returns,
        jnp.exp(reduce.masked(groups.old_logprobs, mask)),
        groups.old_sum_squared,
        mask,
        groups.group,
        rows,
        num_groups=groups.num_groups,
    )
    return token_advantages, state, common.count_groups(groups, reward)


OBJECTIVE = common.CLIPPED._replace(
    config=OTB,
    check=check,
    advantages=advantages,
    needs=needs,
)
