"""PPO-max: PPO with rewards divided by their running std, and clipped advantages.

    R_i = clip(reward_i / std of all rewards so far, -reward_clip, reward_clip)                            R18
    A_t = clip(whitened GAE, -advantage_clip, advantage_clip)                                             A13, A23
    everything else is PPO's: the KL in the reward, the clip, the value loss, the mean over tokens       R17, L2, V1, G1

The std is over the rewards of this step and of all steps before; a single first reward is not scaled. With
Online.critic the critic is a separate model, as published.

Source: Zheng et al. 2307.04964 (PPO-max); limits of its code: 10 and 0.5. Its pretraining term is Online.pretraining
(L17), available in every stage on samples and off by default, as in its code.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, contract, ppo
from jrl.algos.contract import Facts, Groups
from jrl.algos.ppo import PPO
from jrl.ops import advantages as advantage_ops
from jrl.ops import reduce, running_scale, shaping
from jrl.ops.running_scale import Moments
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class PPOMax(PPO):
    reward_clip: float | None = 10.0  # the scaled reward is limited to +- this, before the KL; None: no limit
    kl_in_reward: float | None = 0.02  # coefficient of the KL to the reference in the reward; None: no reference
    advantage_clip: float | None = 0.5  # whitened advantages are limited to +- this; None: no limit


def check(config: PPOMax, facts: Facts) -> None:
    ppo.check(config, facts)
    if config.advantage_clip is not None:
        common.check_positive(config, {"advantage_clip": "every advantage would be 0. 0.5 is usual, None is no limit."})


def moments_with(groups: Groups, state: Moments) -> Moments:
    return running_scale.add_to_moments(state, groups.reward, contract.eligible(groups))


def shape_with_state(config: PPOMax, groups: Groups, reward: Array, state: Moments) -> Array:
    scaled = running_scale.scale_by_moments(groups.reward, moments_with(groups, state))
    return scaled if config.reward_clip is None else shaping.clip_reward(scaled, limit=config.reward_clip)


def advantages(config: PPOMax, groups: Groups, reward: Array, state: Moments) -> tuple[Array, PyTree, dict[str, Array]]:
    unwhitened, counts = ppo.estimates(config, groups, reward)
    moments, token_advantages = moments_with(groups, state), reduce.whiten(unwhitened, counts)
    deviation = jnp.sqrt(moments.squares / jnp.maximum(moments.count - 1, 1))
    counters = ppo.counters(config, groups, reward) | {"reward_deviation": deviation}
    if config.advantage_clip is not None:
        counters["clipped"] = reduce.masked_mean(jnp.abs(token_advantages) > config.advantage_clip, counts)
        token_advantages = advantage_ops.clip_advantages(token_advantages, limit=config.advantage_clip)
    return token_advantages, moments, counters


OBJECTIVE = ppo.OBJECTIVE._replace(
    config=PPOMax,
    check=check,
    init_state=lambda config: running_scale.no_moments(),
    shape=lambda config, groups: groups.reward,
    shape_with_state=shape_with_state,
    advantages=advantages,
)
