"""PPO: advantages from a value head, by generalized advantage estimation; PPO's clip; the mean over tokens.

    r_t = R_i on the last sampled token, 0 before; rewards of spans on theirs; -kl_in_reward * k_t             R16, R17
    A_t = gae(r, v_old), whitened over all sampled tokens of the step; Ret_t = A_t + v_old before that    A13, A23
    l_t = max(-rho_t * A_t, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_t)                              L2 (L3)
        + value_coefficient * 0.5 * max((v_t - Ret_t)^2, (v_old + clip(v_t - v_old) - Ret_t)^2)           V1
    L   = mean over all tokens of the step                                                                G1

The value head reads the policy's last hidden states, so its loss also trains the layers below; with Online.critic it is
on a separate model, trained with V1 alone, without the coefficient. No groups are needed. Every scored row trains both
policy and value head.

Source: Schulman et al. 1707.06347 eq. 9 and 1506.02438; for language models Ziegler et al. 1909.08593, from whom the
value coefficient is. The KL to the reference is off by default; Ziegler et al. adapt its coefficient, TRL has 0.05.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups, Needs, Objective, Tokens
from jrl.ops import gae, reduce, shaping, values
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class PPO:
    clip_low: float = 0.2  # a ratio below 1 - clip_low is not pushed down further
    clip_high: float = 0.2  # a ratio above 1 + clip_high is not pushed up further
    dual_clip: float | None = None  # largest ratio where A < 0, above 1 + clip_high; None: no bound
    discount: float = 1.0  # gamma, by sampled token
    gae_lambda: float = 0.95  # lambda: 1 trusts rewards alone, 0 the value of the next token
    value_coefficient: float = 0.1  # weight of the value loss where the head is on the policy
    value_clip: float | None = 0.2  # how far a value may move in the updates of a batch; None: no clip
    kl_in_reward: float | None = None  # coefficient of the KL to the reference in the reward; None: no reference
    kl_in_reward_estimator: Literal["k1", "k2", "k3"] = "k1"  # of that KL, token by token
    reward_clip: float | None = None  # the row's reward is limited to +- this, before the KL; None: no limit
    whiten_rewards: bool = False  # rewards of tokens have variance 1 over the step, and keep their mean
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus
    importance: common.TruncatedImportance | None = None  # correction for stale or mismatched samplers; None: none


def check(config: PPO, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=False)
    common.check_clip(config)
    common.check_importance(config)
    common.check_entropy(config)
    name = type(config).__name__
    common.check_kl_in_reward(config)
    if config.reward_clip is not None and not config.reward_clip > 0:
        raise ValueError(
            f"{name}.reward_clip = {config.reward_clip} must be above 0, or None for no limit. 10.0 is usual."
        )
    if not 0 < config.discount <= 1:
        raise ValueError(
            f"{name}.discount = {config.discount} must lie in (0, 1]. 1.0 is usual: an answer ends anyway."
        )
    if not 0 <= config.gae_lambda <= 1:
        raise ValueError(
            f"{name}.gae_lambda = {config.gae_lambda} must lie in [0, 1]: the lambda of generalized advantage "
            "estimates. 0.95 is usual, 1.0 for long answers that are judged at their end."
        )
    if not config.value_coefficient > 0:
        raise ValueError(
            f"{name}.value_coefficient = {config.value_coefficient} must be above 0: the value head would never learn. "
            "0.1 is usual; GRPO, DrGRPO, DAPO and Reinforce have no value head."
        )
    if config.value_clip is not None and not config.value_clip > 0:
        raise ValueError(f"{name}.value_clip = {config.value_clip} must be above 0, or None for no clip. 0.2 is usual.")


def shape(config: PPO, groups: Groups) -> Array:
    if config.reward_clip is None:
        return groups.reward
    return shaping.clip_reward(groups.reward, limit=config.reward_clip)


def rewards_of_tokens(config: PPO, groups: Groups, reward: Array) -> tuple[Array, Array]:
    """Returns the rewards that advantages are computed from, [N, T] float, and the tokens that count, [N, T] bool."""
    counts = groups.action_mask & contract.eligible(groups)[:, None]
    rewards = common.rewards_of_tokens(config, groups, reward)
    return shaping.whiten_rewards(rewards, counts) if config.whiten_rewards else rewards, counts


def estimates(config: PPO, groups: Groups, reward: Array) -> tuple[Array, Array]:
    """Returns the advantages before whitening, [N, T] float, and the tokens that count, [N, T] bool."""
    rewards, counts = rewards_of_tokens(config, groups, reward)
    return gae.gae(rewards, groups.values, counts, discount=config.discount, gae_lambda=config.gae_lambda), counts


def counters(config: PPO, groups: Groups, reward: Array) -> dict[str, Array]:
    """Returns the counters of every objective and, with `whiten_rewards`, the deviation that the rewards of tokens are
    divided by, and so is the coefficient of a KL among them (R18)."""
    counted = common.count_groups(groups, reward)
    if not config.whiten_rewards:
        return counted
    counts = groups.action_mask & contract.eligible(groups)[:, None]
    variance = reduce.masked_var(common.rewards_of_tokens(config, groups, reward), counts)
    return counted | {"token_reward_deviation": jnp.sqrt(variance)}


def advantages(config: PPO, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    unwhitened, counts = estimates(config, groups, reward)
    return reduce.whiten(unwhitened, counts), state, counters(config, groups, reward)


def returns(config: PPO, groups: Groups, reward: Array) -> Array:
    unwhitened, counts = estimates(config, groups, reward)
    return unwhitened + reduce.masked(groups.values, counts)


def estimated_by(
    estimates: Callable[[Any, Groups, Array], tuple[Array, Array, Array]],
) -> dict[str, Callable[..., Any]]:
    """Returns the functions of an objective whose values are trained on returns of their own.

    Args:
      estimates: (config, groups, reward) -> the advantages before whitening and the returns, [N, T] float, and the
        tokens that count, [N, T] bool.
    """

    def advantages(config: Any, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
        unwhitened, _, counts = estimates(config, groups, reward)
        return reduce.whiten(unwhitened, counts), state, counters(config, groups, reward)

    return {"advantages": advantages, "returns": lambda config, groups, reward: estimates(config, groups, reward)[1]}


def value_loss(config: PPO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    loss, binds = values.clipped_value_loss(
        tokens.values, tokens.old_values, tokens.returns, tokens.mask, clip=config.value_clip
    )
    value_metrics = {"value/loss": loss, "value/clipped": binds, "value/mean": tokens.values}
    return loss, common.metrics_of(tokens, value_metrics)


def token_loss(config: PPO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    loss, metrics = common.clipped_token_loss(config, tokens, state)
    if tokens.values is None:
        return loss, metrics
    value_term, value_metrics = value_loss(config, tokens, state)
    return loss + config.value_coefficient * value_term, {**metrics, **value_metrics}


OBJECTIVE = Objective(
    config=PPO,
    check=check,
    corrects_staleness=common.has_importance,
    shape=shape,
    advantages=advantages,
    token_loss=token_loss,
    value_loss=value_loss,
    needs=lambda config: Needs(
        values=True, entropy_gradient=config.entropy_bonus is not None, **common.needs_of_reward(config)
    ),
    returns=returns,
)
