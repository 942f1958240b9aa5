"""GSPO: GRPO with one ratio per sequence, the geometric mean of its tokens' ratios.

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                                    A3
    s_i = exp(mean over the sequence of logprobs - old_logprobs)
    l_i = max(-s_i * A_i, -clip(s_i, 1 - clip_low, 1 + clip_high) * A_i)                     L5
    L   = mean over sequences                                                                G2

A mean of log-ratios varies far less than a token's ratio, hence the narrow clip. The reduction is part of the method: a
token mean would weight sequences by length, which the mean in s_i removes.

Source: Zheng et al. 2507.18071 eq. 5 to 7. verl forces G2, TRL warns, AReaL reduces by a token mean.
"""

from __future__ import annotations

import jax

from jrl.algos import common, grpo
from jrl.algos.contract import Facts, Tokens
from jrl.ops import sequence_ratio
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class GSPO:
    clip_low: float = 3e-4  # a sequence's ratio below 1 - clip_low is not pushed down further
    clip_high: float = 4e-4  # a sequence's ratio above 1 + clip_high is not pushed up further
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus
    importance: common.TruncatedImportance | None = None  # correction for stale or mismatched samplers; None: none


def check(config: GSPO, facts: Facts) -> None:
    common.check_weighted(config, facts)
    common.check_ratio_bounds(config)


def token_loss(config: GSPO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    loss = sequence_ratio.gspo(
        tokens.logprobs,
        tokens.old_logprobs,
        tokens.advantages,
        tokens.mask,
        tokens.segment,
        num_segments=tokens.num_segments,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
    return common.weighted_loss(config, loss, tokens, ratio_metrics(config, tokens))


def ratio_metrics(config: GSPO, tokens: Tokens) -> dict[str, Array]:
    """Returns the sequences' ratios, and where their clip binds."""
    s = sequence_ratio.mean_ratio(
        tokens.logprobs, tokens.old_logprobs, tokens.mask, tokens.segment, num_segments=tokens.num_segments
    )
    return {"sequence_ratio": s, **common.bound_metrics(config, s, tokens)}


OBJECTIVE = grpo.OBJECTIVE._replace(config=GSPO, check=check, needs=common.entropy_needs, token_loss=token_loss)
