"""Clip-Cov: GRPO that drops a few random tokens out of those that reduce the entropy most.

    A_i   = (R_i - mean_g) / (std_g + 1e-6)                                                  A3
    cov_t = (A_t - mean A) * (old_logprobs_t - mean old_logprobs), means over the step       L20
    A_t   = 0 on floor(share * tokens) of the tokens with low < cov_t < high
    l_t   = max(-rho_t * A_t, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_t)                L2
    L     = mean over all tokens of the step                                                 G1

A token that is already likely and has a high advantage sharpens the policy most; without such tokens the entropy does
not collapse. Tokens are selected once per batch, by the log-probs before its updates. The random bits of a token depend
on its step, prompt, sample and column alone.

Source: Cui et al. 2505.22617: 2e-4 of the tokens, covariance between 1 and 5. verl selects per micro-batch, and at
least one token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, contract, grpo
from jrl.algos.contract import Facts, Groups, Objective
from jrl.ops import covariance, reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class ClipCov:
    share: float = 2e-4  # of the tokens that are taken out of the loss
    low: float = 1.0  # they are chosen among those whose covariance is above `low`
    high: float = 5.0  # and below `high`
    clip_low: float = 0.2  # a ratio below 1 - clip_low is not pushed down further
    clip_high: float = 0.2  # a ratio above 1 + clip_high is not pushed up further
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus
    importance: common.TruncatedImportance | None = None  # correction for stale or mismatched samplers; None: none


def check(config: ClipCov, facts: Facts) -> None:
    common.check_weighted(config, facts)
    common.check_ratio_bounds(config)
    if not 0 < config.share < 1:
        raise ValueError(
            f"ClipCov.share = {config.share} must lie in (0, 1): the share of tokens taken out. 2e-4 is usual."
        )
    if not config.low < config.high:
        raise ValueError(
            f"ClipCov.low = {config.low} must be below ClipCov.high = {config.high}: tokens whose covariance lies "
            "between them are taken out. 1.0 and 5.0 are usual."
        )


def init_state(config: ClipCov) -> PyTree:
    return {"draws": jnp.int32(0)}


def advantages(config: ClipCov, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    token_advantages, _, counters = grpo.advantages(config, groups, reward, ())
    mask = groups.action_mask & contract.eligible(groups)[:, None]
    dropped = covariance.clip_cov(
        groups.old_logprobs,
        token_advantages,
        mask,
        common.token_draws(groups, state["draws"]),
        share=config.share,
        low=config.low,
        high=config.high,
    )
    next_state = {"draws": state["draws"] + 1}
    token_advantages = jnp.where(dropped, 0, token_advantages)
    return token_advantages, next_state, counters | {"dropped": reduce.masked_mean(dropped, mask)}


OBJECTIVE = Objective(
    config=ClipCov,
    check=check,
    corrects_staleness=common.has_importance,
    needs=lambda config: common.entropy_needs(config)._replace(credit_logprobs=True),
    init_state=init_state,
    advantages=advantages,
    token_loss=common.ppo_clip_token_loss,
)
