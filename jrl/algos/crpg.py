"""CRPG: REINFORCE on a reward that shrinks as the policy leaves its reference, less the batch's mean.

    R_i = max(1 - d_i / kl_limit, 0) * reward_i,  d_i the sum of the row's log-ratios to the reference   R13
    A_i = R_i - mean of the rows that count                                                              A2
    l_t = -A_i * logprobs_t                                                                              L1
    L   = mean over all tokens of the step                                                               G1

The reward should be in [0, 1], and 0 where a judge is not satisfied: `Shaping.constraints` makes that of components.
The factor takes from a reward above 0 what the policy has moved for it; a negative one it would make less bad, so that
leaving the reference paid. A reward below 0 counts as 0, and `advantage/negative_rewards` says how many there were.
The reference is the policy as the stage found it.

Source: CGPO, 2409.20370 section 4.2, whose reward is a reward model's, calibrated by that of a baseline answer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups, Needs, Objective
from jrl.algos.reinforce import check_one_update, token_loss
from jrl.ops import advantages as advantage_ops
from jrl.ops import constraints, reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class CRPG:
    kl_limit: float = 10.0  # nats of a whole completion, at which nothing is left of its reward
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus
    importance: common.TruncatedImportance | None = None  # correction for a sampler that is not the learner; None: none


def check(config: CRPG, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=False)
    common.check_importance(config)
    common.check_entropy(config)
    common.check_positive(config, {"kl_limit": "it is what a completion's log-ratio is divided by. 10.0 is usual."})
    check_one_update(config, facts)


def advantages(config: CRPG, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    counts = contract.eligible(groups)
    scored = jnp.where(counts, reward, 0)
    bounded = constraints.kl_bounded_reward(
        jnp.maximum(scored, 0),
        groups.old_logprobs,
        groups.ref_logprobs,
        groups.action_mask & counts[:, None],
        limit=config.kl_limit,
    )
    # The baseline of a first batch is its own mean.
    row, _ = advantage_ops.moving_baseline(bounded, counts, jnp.full((), jnp.nan), decay=0.0)
    counters = common.count_groups(groups, reward) | {
        "bounded_reward": reduce.masked_mean(bounded, counts),
        "negative_rewards": jnp.sum(scored < 0),
    }
    return advantage_ops.spread(row, groups.action_mask), state, counters


OBJECTIVE = Objective(
    config=CRPG,
    check=check,
    corrects_staleness=common.has_importance,
    advantages=advantages,
    token_loss=token_loss,
    needs=lambda config: Needs(reference=True, credit_logprobs=True, entropy_gradient=config.entropy_bonus is not None),
)
