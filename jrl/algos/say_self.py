"""SaySelf: PPO on the tokens that say how sure the policy is of its answer.

    R_i = 1 - 2 (correct - confidence)^2, -1 without a confidence                                          R21
    m_t = 1 from the token on with which the confidence begins, 0 before
    everything else is PPO's, over the tokens of m                                                       A13, L2, V1, G1

The verifier ConfidenceSpan gives that reward to the span with which the confidence begins. Here it marks where
learning begins, and is moved to the row's last token; a verifier that rewards spans otherwise would be read likewise.
So what is said before the confidence is learned by imitation alone. A row without such a reward is not learned from.

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


def keep_tokens(config: SaySelf, groups: Groups) -> Array:
    if groups.token_reward is None:
        return groups.action_mask
    rewarded = groups.action_mask & (groups.token_reward != 0)
    return groups.action_mask & (jnp.cumsum(rewarded, axis=1) > 0)


def of_confidence(config: SaySelf, groups: Groups) -> Groups:
    """Returns the rows as if their confidence were all that was sampled."""
    return groups.replace(action_mask=keep_tokens(config, groups), token_reward=None)


def reward_of(config: SaySelf, groups: Groups, reward: Array) -> Array:
    """Returns the rewards of rows with those of their spans, limited by reward_clip."""
    if groups.token_reward is None:
        return reward
    whole = reduce.widen(reward) + reduce.masked(groups.token_reward, groups.action_mask).sum(axis=1)
    return whole if config.reward_clip is None else shaping.clip_reward(whole, limit=config.reward_clip)


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
