"""VAPO: PPO for long answers. The value head is trained on returns, the policy's lambda grows with the length of the
answer, and right answers are also imitated.

    Ret_t = R_i, GAE with lambda 1                                                                        A14
    A_t   = gae(r, v_old) with lambda 1 - 1 / (length_alpha * length), whitened over the step's tokens     A14, A23
    l_t   = PPO's clip, 0.2 below and 0.28 above, and its value loss                                      L2 (L3), V1
    L     = mean over all tokens of the step                                                              G1
            - positive_nll * (mean of logprobs_t over the tokens of the step's right rows)                L17

A row is right if its outcome is 1, without partial credit, whatever else is in its reward; the term is refused where
the first verifier only watches (weight 0). The second mean is over the right rows of the whole optimizer step, so its
weight does not depend on how many are right; it is 0 if none is. The importance weights apply to it as well, since
these are the policy's samples.

Source: VAPO 2504.05118: alpha 0.05, coefficient 0.1, 16 samples per prompt. It first trains the value head alone; here
the head is initialized to 0. Answers of at most 1 / length_alpha tokens have lambda 0: rewards then reach earlier
tokens only through the values.
"""

from __future__ import annotations

import dataclasses

import jax

from jrl.algos import common, contract, ppo
from jrl.algos.contract import Facts, Groups, Tokens
from jrl.algos.ppo import PPO
from jrl.ops import gae, likelihood, reduce
from jrl.types import PyTree, traced

Array = jax.Array

CRITIC_LAMBDA = 1.0  # targets of the value head are returns


@traced
class VAPO(PPO):
    clip_high: float = 0.28  # a ratio above 1 + clip_high is not pushed up further
    gae_lambda: float | None = None  # of advantages, for rows of every length; None: by length
    # Share of a row's tokens that lambda reaches back over; for rows of up to 1 / length_alpha tokens, lambda is 0.
    length_alpha: float = 0.05
    positive_nll: float | None = 0.1  # coefficient of the imitation of right answers; None: none


def check(config: VAPO, facts: Facts) -> None:
    by_length = config.gae_lambda is None
    ppo.check(dataclasses.replace(config, gae_lambda=1.0) if by_length else config, facts)
    if not config.length_alpha > 0:
        raise ValueError(f"VAPO.length_alpha = {config.length_alpha} must be above 0. 0.05 is usual.")
    if config.positive_nll is not None and not config.positive_nll > 0:
        raise ValueError(f"VAPO.positive_nll = {config.positive_nll} must be above 0, or None. 0.1 is usual.")
    if config.positive_nll is not None:
        reads = f"imitates what the first verifier calls right (positive_nll = {config.positive_nll})"
        common.check_outcome(config, facts, reads=reads, instead="Set VAPO.positive_nll = None")


def estimates(config: VAPO, groups: Groups, reward: Array) -> tuple[Array, Array, Array]:
    """Returns advantages before whitening and returns, [N, T] float, and the tokens that count, [N, T] bool."""
    rewards, counts = ppo.rewards_of_tokens(config, groups, reward)
    policy_lambda = config.gae_lambda
    if policy_lambda is None:
        policy_lambda = gae.length_adaptive_lambda(counts, alpha=config.length_alpha)
    unwhitened, returns = gae.decoupled_gae(
        rewards,
        groups.values,
        counts,
        discount=config.discount,
        policy_lambda=policy_lambda,
        critic_lambda=CRITIC_LAMBDA,
    )
    return unwhitened, returns, counts


def token_loss(config: VAPO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    loss, metrics = ppo.token_loss(config, tokens, state)
    if config.positive_nll is None:
        return loss, metrics
    weights = reduce.masked(tokens.positive_weights, tokens.mask)
    imitation = weights * likelihood.positive_nll(tokens.logprobs, weights > 0, tokens.mask)
    imitation, _ = common.correct(config.importance, imitation, tokens)
    metrics |= common.metrics_of(tokens, {"positive_nll": imitation, "right": reduce.widen(weights > 0)})
    return loss + config.positive_nll * imitation, metrics


def positive(config: VAPO, groups: Groups) -> Array:
    return contract.eligible(groups) & (groups.outcome >= 1)


OBJECTIVE = ppo.OBJECTIVE._replace(
    config=VAPO,
    check=check,
    positive=positive,
    token_loss=token_loss,
    **ppo.estimated_by(estimates),
)
