"""SaySelf: PPO on the tokens in which the policy states its confidence.

    R_i = 1 - 2 (correct - confidence)^2, -1 without a confidence                                          R21
    m_t = 1 from the first token of the confidence on, 0 before
    everything else is PPO, over the tokens of m                                                         A13, L2, V1, G1

The verifier ConfidenceSpan puts that reward on the span at which the confidence begins. Here the span marks where
training begins, and the reward moves to the row's last token; the rewards of any other span verifier are read the same
way. The text before the confidence is trained by imitation only, in another stage. Rows without such a reward are left
out.

Source: SaySelf, Xu et al. 2405.20974.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import contract, ppo
from jrl.algos.contract import Facts, Groups
from jrl.algos.ppo import PPO
from jrl.ops import reduce, shaping
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class SaySelf(PPO):
    pass


def check(config: SaySelf, facts: Facts) -> None:
    ppo.check(config, facts)
    if facts.without_spans:
        raise ValueError("SaySelf learns from where the confidence begins: add @ConfidenceSpan() to Scoring.verifiers, "
                         "and leave out what else rewards tokens (Online.process, Online.corrector)")  # fmt: skip
    if facts.potential:
        raise ValueError("SaySelf moves the reward of the confidence to the row's last token, where Shaping.potential "
                         "takes it back: every row would earn 0. Leave Shaping.potential out")  # fmt: skip


def keep_tokens(config: SaySelf, groups: Groups) -> Array:
    if groups.token_reward is None:
        return groups.action_mask
    rewarded = groups.action_mask & (groups.token_reward != 0)
    return groups.action_mask & (jnp.cumsum(rewarded, axis=1) > 0)


def of_confidence(config: SaySelf, groups: Groups) -> Groups:
    """Returns the rows with only the tokens of the confidence as actions."""
    return groups.replace(action_mask=keep_tokens(config, groups), token_reward=None)


def reward_of(config: SaySelf, groups: Groups, reward: Array) -> Array:
    """Returns the rows' rewards plus those of their spans, limited by reward_clip."""
    if groups.token_reward is None:
        return reward
    total = reduce.widen(reward) + reduce.masked(groups.token_reward, groups.action_mask).sum(axis=1)
    return total if config.reward_clip is None else shaping.clip_reward(total, limit=config.reward_clip)


def advantages(config: SaySelf, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    return ppo.advantages(config, of_confidence(config, groups), reward_of(config, groups, reward), state)


def returns(config: SaySelf, groups: Groups, reward: Array) -> Array:
    return ppo.returns(config, of_confidence(config, groups), reward_of(config, groups, reward))


OBJECTIVE = ppo.OBJECTIVE._replace(
    config=SaySelf,
    check=check,
    keep=lambda config, groups: contract.eligible(of_confidence(config, groups)),
    keep_tokens=keep_tokens,
    advantages=advantages,
    returns=returns,
)
