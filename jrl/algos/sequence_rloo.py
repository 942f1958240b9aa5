"""SequenceRLOO: RLOO with a whole answer as one action, and the KL to the reference in the reward.

    R'_i = R_i + rewards of spans - kl_in_reward * sum_t k(old_t - ref_t)                    R16, R17
    A_i  = R'_i - mean of the other R' of the group                                          A5
    rho_i = exp(sum over the answer of logprobs_t - old_logprobs_t)
    l_i  = max(-rho_i * A_i, -clip(rho_i, 1 - clip_low, 1 + clip_high) * A_i)                 L7
    L    = mean over sequences; each token has l_i, with weight 1 / length                   G2

The ratio of a sequence grows and shrinks exponentially with its length: use one or two updates per batch.

Source: Ahmadian et al. 2402.14740, as in TRL's RLOO: k1, coefficient 0.05, 2 samples per prompt. Our RLOO clips the
ratios of tokens and has no KL.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups, Objective, Tokens
from jrl.ops import advantages as advantage_ops
from jrl.ops import reduce, sequence_ratio
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class SequenceRLOO:
    clip_low: float = 0.2  # a ratio below 1 - clip_low is not pushed down further
    clip_high: float = 0.2  # a ratio above 1 + clip_high is not pushed up further
    kl_in_reward: float | None = 0.05  # coefficient of the KL to the reference in the reward; None: no reference
    kl_in_reward_estimator: Literal["k1", "k2", "k3"] = "k1"  # of that KL, token by token
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus


def check(config: SequenceRLOO, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=True)
    common.check_ratio_bounds(config)
    common.check_kl_in_reward(config)
    common.check_entropy(config)
    if facts.potential:
        raise ValueError(
            "SequenceRLOO adds up the rewards of a completion's tokens, and Shaping.potential takes them back with the "
            "last one: nothing would be learned from them. Leave Shaping.potential out, or use ReinforcePlusPlus"
        )


def advantages(
    config: SequenceRLOO, groups: Groups, reward: Array, state: PyTree
) -> tuple[Array, PyTree, dict[str, Array]]:
    penalized = jnp.sum(common.rewards_of_tokens(config, groups, reward), axis=-1)
    row = advantage_ops.leave_one_out(penalized, groups.group, contract.eligible(groups), num_groups=groups.num_groups)
    return advantage_ops.spread(row, groups.action_mask), state, common.count_groups(groups, reward)


def token_loss(config: SequenceRLOO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    loss = sequence_ratio.sequence_clipped(
        tokens.logprobs,
        tokens.old_logprobs,
        tokens.advantages,
        tokens.mask,
        tokens.segment,
        num_segments=tokens.num_segments,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
    return common.unweighted_loss(config, loss, tokens)


OBJECTIVE = Objective(
    config=SequenceRLOO,
    check=check,
    advantages=advantages,
    token_loss=token_loss,
    weights=lambda config, loss_mask, max_completion: reduce.inverse_length_weights(loss_mask),
    denominator=lambda config, loss_mask, rows, max_completion: reduce.count_sequences(loss_mask),
    needs=lambda config: common.entropy_needs(config)._replace(**common.needs_of_reward(config)),
)
