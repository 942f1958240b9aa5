"""REINFORCE with a moving baseline: the reward minus its running mean; no groups needed.

    r_t = R_i on the last sampled token, 0 before; rewards of spans on theirs; -kl_in_reward * k_t     R16, R17
    A_t = (sum of r from t on) - b;  afterwards b <- decay * b + (1 - decay) * mean of the rows' sums    A1, A2
    l_t = -A_t * logprobs_t                                                                             L1
    L   = mean over all tokens of the step                                                              G1

Without rewards of spans and without a KL, A_t = R_i - b on every token.

The baseline is part of the train state; before the first batch it is NaN, and the first batch sets it to its mean.

Source: Williams 1992; the baseline as in prime-rl, which starts it at 0.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups, Needs, Objective, Tokens
from jrl.ops import advantages as advantage_ops
from jrl.ops import surrogate
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class Reinforce:
    baseline_decay: float = 0.95  # share of the old baseline that stays at each step
    kl_in_reward: float | None = None  # coefficient of the KL to the reference in the reward; None: no reference
    kl_in_reward_estimator: Literal["k1", "k2", "k3"] = "k1"  # of that KL, token by token
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus
    importance: common.TruncatedImportance | None = None  # correction for stale or mismatched samplers; None: none


def check(config: Reinforce, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=False)
    common.check_importance(config)
    common.check_entropy(config)
    common.check_kl_in_reward(config)
    if not 0 <= config.baseline_decay < 1:
        raise ValueError(
            f"Reinforce.baseline_decay = {config.baseline_decay} must lie in [0, 1): the share of the old baseline "
            "that stays at each step. 0.95 is usual; at 1 it would never move."
        )
    check_one_update(config, facts)


def check_one_update(config: Any, facts: Facts) -> None:
    """Raises ValueError if a loss without a ratio would make several updates per batch."""
    if facts.updates_per_batch > 1:
        raise ValueError(
            f"{type(config).__name__} takes one update a batch, got updates_per_batch={facts.updates_per_batch}: its "
            "loss has no ratio, so from the second update on it would follow samples of another policy. Use GRPO, "
            "DrGRPO or DAPO."
        )


def init_state(config: Reinforce) -> PyTree:
    return {"baseline": jnp.full((), jnp.nan, jnp.float32)}


def advantages(
    config: Reinforce, groups: Groups, reward: Array, state: PyTree
) -> tuple[Array, PyTree, dict[str, Array]]:
    rewards = common.rewards_of_tokens(config, groups, reward)
    row, baseline = advantage_ops.moving_baseline(
        rewards.sum(-1), contract.eligible(groups), state["baseline"], decay=config.baseline_decay
    )
    earlier = jnp.where(groups.action_mask, jnp.cumsum(rewards, -1) - rewards, 0)
    counters = common.count_groups(groups, reward) | {"baseline": baseline}
    advantage = advantage_ops.spread(row, groups.action_mask) - earlier
    return advantage, {"baseline": baseline.astype(jnp.float32)}, counters


def token_loss(config: Reinforce, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    loss = surrogate.policy_gradient(tokens.logprobs, tokens.advantages, tokens.mask)
    return common.weighted_loss(config, loss, tokens)


OBJECTIVE = Objective(
    config=Reinforce,
    check=check,
    corrects_staleness=common.has_importance,
    init_state=init_state,
    advantages=advantages,
    token_loss=token_loss,
    needs=lambda config: Needs(entropy_gradient=config.entropy_bonus is not None, **common.needs_of_reward(config)),
)
