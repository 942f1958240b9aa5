"""Clip-Cov: GRPO without a few of the tokens that make the entropy fall, chosen at random.

    A_i   = (R_i - mean_g) / (std_g + 1e-6)                                                  A3
    cov_t = (A_t - mean A) * (old_logprobs_t - mean old_logprobs), means over the step       L20
    A_t   = 0 on floor(share * tokens) of the tokens with low < cov_t < high
    l_t   = max(-rho_t * A_t, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_t)                L2
    L     = mean over all tokens of the step                                                 G1

A token that is likely already and is rewarded more than others sharpens the policy most; where such tokens are taken
out, the entropy stays. Tokens are chosen once a batch, by the log-probs that its updates begin with. The draw of a
token is named by step, prompt, sample and column.

Source: Cui et al. 2505.22617: 2e-4 of the tokens, between 1 and 5. verl chooses by micro-batch, and at least one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, contract, grpo
from jrl.algos.contract import Facts, Groups, Objective
from jrl.ops import covariance, reduce
from jrl.ops.threefry import threefry
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
    importance: common.TruncatedImportance | None = None  # correction for a sampler that is not the learner; None: none


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
    found, _, counters = grpo.advantages(config, groups, reward, ())
    mask = groups.action_mask & contract.eligible(groups)[:, None]
    limits = {"share": config.share, "low": config.low, "high": config.high}
    dropped = covariance.clip_cov(groups.old_logprobs, found, mask, noise(groups, state["draws"]), **limits)
    following = {"draws": state["draws"] + 1}
    return jnp.where(dropped, 0, found), following, counters | {"dropped": reduce.masked_mean(dropped, mask)}


def noise(groups: Groups, draw: Array) -> Array:
    """Returns random bits for every token, [N, T] uint32, by the names of draw, prompt, sample and column."""
    wide = lambda x: jnp.broadcast_to(x, groups.action_mask.shape).astype(jnp.uint32)
    column = jax.lax.broadcasted_iota(jnp.uint32, groups.action_mask.shape, 1)
    key = wide(draw), wide(groups.group[:, None])
    return threefry(key, (wide(groups.sample[:, None]), column))[0]


OBJECTIVE = Objective(
    config=ClipCov,
    check=check,
    corrects_staleness=common.has_importance,
    needs=lambda config: common.entropy_needs(config)._replace(credit_logprobs=True),
    init_state=init_state,
    advantages=advantages,
    token_loss=common.ppo_clip_token_loss,
)
