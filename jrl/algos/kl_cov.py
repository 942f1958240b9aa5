"""KL-Cov: GRPO with a KL penalty on the few tokens that reduce the entropy most.

    A_i   = (R_i - mean_g) / (std_g + 1e-6)                                                  A3
    cov_t = (A_t - mean A) * (old_logprobs_t - mean old_logprobs), means over the step       L20
    l_t   = -rho_t * A_t, plus coefficient * |logprobs_t - old_logprobs_t| on the
            floor(share * tokens) tokens with the largest cov_t
    L     = mean over all tokens of the step                                                 G1

No ratio is clipped. Tokens are selected once per batch, by the log-probs before its updates; the penalty acts from the
second update of a batch on.

Source: Cui et al. 2505.22617: 2e-4 of the tokens, coefficient 1 (0.1 in verl's configuration).
"""

from __future__ import annotations

import jax

from jrl.algos import common, contract, grpo
from jrl.algos.contract import Facts, Groups, Objective, Tokens
from jrl.ops import covariance
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class KLCov:
    share: float = 2e-4  # of the tokens that are held
    coefficient: float = 1.0  # weight of their distance to where they were
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus
    importance: common.TruncatedImportance | None = None  # correction for stale or mismatched samplers; None: none


def check(config: KLCov, facts: Facts) -> None:
    common.check_weighted(config, facts)
    if not 0 < config.share < 1:
        raise ValueError(f"KLCov.share = {config.share} must lie in (0, 1): the share of tokens held. 2e-4 is usual.")
    common.check_positive(config, {"coefficient": "at 0 nothing is held. 1.0 is usual."})


def select(config: KLCov, groups: Groups, advantages: Array) -> Array:
    mask = groups.action_mask & contract.eligible(groups)[:, None]
    return covariance.kl_cov(groups.old_logprobs, advantages, mask, share=config.share)


def token_loss(config: KLCov, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    arrays = (tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.selected, tokens.mask)
    loss = covariance.kl_cov_loss(*arrays, coefficient=config.coefficient)
    return common.weighted_loss(config, loss, tokens, {"held": tokens.selected})


OBJECTIVE = Objective(
    config=KLCov,
    check=check,
    corrects_staleness=common.has_importance,
    needs=lambda config: common.entropy_needs(config)._replace(credit_logprobs=True),
    advantages=grpo.advantages,
    select=select,
    token_loss=token_loss,
)
