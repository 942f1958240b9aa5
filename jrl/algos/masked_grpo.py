"""Masked GRPO: GRPO without the sequences on which sampler and learner disagree too much.

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                                    A3
    w_i = exp(sum over the sequence of old_logprobs - behaviour_logprobs), or of their mean
    l_t = max(-rho_t * A_i, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_i)                  L2
          where low <= w_i <= high, else 0                                                   L10
          and 0 where A_i < 0 and mean(behaviour_logprobs - logprobs) > delta, if it is set   L10
    L   = mean over sequences of the mean over their tokens, rejected ones included          G2

`level` selects what must be within the limits: 'sequence', the product of a sequence's token weights; 'geometric',
their geometric mean; 'every_token', each of them. IcePop rejects single tokens. The metric `rejected` is the share of
tokens that are dropped; above `most_rejected` the run stops, since the cause of the mismatch comes first.

Source: masked importance sampling as in TRL (its default: product, at most 3) and verl; the second mask is OPSM of
DeepSeek-V3.2.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jrl.algos import common, grpo
from jrl.algos.contract import Facts, Tokens
from jrl.ops import importance
from jrl.types import PyTree, traced

Array = jax.Array

ACCEPTED = {
    "sequence": importance.accepted_by_sequence,
    "geometric": importance.accepted_by_geometric_mean,
    "every_token": importance.accepted_by_every_token,
}


@traced
class MaskedGRPO:
    level: Literal["sequence", "geometric", "every_token"] = "sequence"  # what has to be within the limits
    low: float = 0.0  # smallest weight that is accepted
    high: float = 3.0  # largest weight that is accepted
    delta: float | None = None  # nats a token, drift at which a failed sequence leaves the loss; None: it stays
    clip_low: float = 0.2  # a ratio below 1 - clip_low is not pushed down further
    clip_high: float = 0.2  # a ratio above 1 + clip_high is not pushed up further
    most_rejected: float | None = 0.5  # largest share of a step's tokens; above it the run stops; None: no limit
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus


def check(config: MaskedGRPO, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=True)
    common.check_ratio_bounds(config)
    common.check_entropy(config)
    common.check_most_rejected(config)
    if config.level not in ACCEPTED:
        raise ValueError(f"MaskedGRPO.level = {config.level!r} must be one of {', '.join(map(repr, ACCEPTED))}.")
    if not 0 <= config.low < 1 < config.high:
        raise ValueError(
            f"MaskedGRPO accepts weights from low = {config.low} to high = {config.high}: 1, where sampler and learner "
            "agree, must lie between them, and low must not be negative. 0.0 and 3.0 are usual for 'sequence'."
        )
    if config.delta is not None and not config.delta > 0:
        raise ValueError(
            f"MaskedGRPO.delta = {config.delta} must be above 0, nats a token that the policy may have drifted, or "
            "None to keep every failed sequence. 0.1 is usual."
        )
    if config.delta is not None and facts.truncated_sampling:
        raise ValueError(
            f"MaskedGRPO.delta = {config.delta} measures drift from the probabilities that tokens were drawn with, "
            "which top-k, top-p and min-p raise: failed sequences of a policy that has not moved would leave the loss. "
            "Leave them out, or set MaskedGRPO.delta = None."
        )


def token_loss(config: MaskedGRPO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    accepted = ACCEPTED[config.level](
        tokens.old_logprobs,
        tokens.behaviour_logprobs,
        tokens.mask,
        tokens.segment,
        num_segments=tokens.num_segments,
        low=config.low,
        high=config.high,
    )
    if config.delta is not None:
        accepted &= importance.near_policy(
            tokens.logprobs,
            tokens.behaviour_logprobs,
            tokens.advantages,
            tokens.mask,
            tokens.segment,
            num_segments=tokens.num_segments,
            delta=config.delta,
        )
    loss, metrics = common.unweighted_loss(
        config, common.ppo_clip(config, tokens), tokens, common.clip_metrics(config, tokens), {"rejected": ~accepted}
    )
    return jnp.where(accepted, loss, 0), metrics


OBJECTIVE = grpo.OBJECTIVE._replace(
    config=MaskedGRPO,
    check=check,
    corrects_staleness=lambda config: True,
    needs=common.entropy_needs,
    token_loss=token_loss,
    stop=common.too_many_rejected,
)
