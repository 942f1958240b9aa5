"""IcePop: GRPO without the tokens on which sampler and learner disagree.

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                                    A3
    w_t = exp(old_logprobs_t - behaviour_logprobs_t)
    l_t = max(-rho_t * A_i, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_i)                  L2
          where low <= w_t <= high, else 0                                                   L10
    L   = mean over sequences of the mean over their tokens, rejected ones included          G2

For models whose sampler and learner disagree, mixtures of experts above all. The metric `rejected` is the share of
tokens that are dropped; above `most_rejected` the run stops, since the cause of the mismatch comes first. With top-k,
top-p or min-p w_t is the share of the probability that they keep, however little the policy has moved.

Source: IcePop, Ling Team 2025, 0.5 and 5; also in verl and open-instruct. verl removes rejected tokens from the
denominator, which gives the others more weight.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, grpo
from jrl.algos.contract import Facts, Tokens
from jrl.ops import importance
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class IcePop:
    low: float = 0.5  # a token learns where its learner's probability over its sampler's is from `low`
    high: float = 5.0  # to `high`
    clip_low: float = 0.2  # a ratio below 1 - clip_low is not pushed down further
    clip_high: float = 0.2  # a ratio above 1 + clip_high is not pushed up further
    most_rejected: float | None = 0.5  # largest share of a step's tokens; above it the run stops; None: no limit
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus


def check(config: IcePop, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=True)
    common.check_ratio_bounds(config)
    common.check_entropy(config)
    common.check_most_rejected(config)
    if not 0 <= config.low < 1 < config.high:
        raise ValueError(
            f"IcePop accepts weights from low = {config.low} to high = {config.high}: 1, where sampler and learner "
            "agree, must lie between them, and low must not be negative. 0.5 and 5.0 are usual."
        )


def token_loss(config: IcePop, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    accepted = importance.accepted(
        tokens.old_logprobs, tokens.behaviour_logprobs, tokens.mask, low=config.low, high=config.high
    )
    loss, metrics = common.unweighted_loss(
        config, common.ppo_clip(config, tokens), tokens, common.clip_metrics(config, tokens), {"rejected": ~accepted}
    )
    return jnp.where(accepted, loss, 0), metrics


OBJECTIVE = grpo.OBJECTIVE._replace(
    config=IcePop,
    check=check,
    corrects_staleness=lambda config: True,
    needs=common.entropy_needs,
    token_loss=token_loss,
    stop=common.too_many_rejected,
)
