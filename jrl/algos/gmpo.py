"""GMPO: GRPO with the geometric mean of a sequence's ratios, clipped token by token.

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                                    A3
    s_i = exp(mean over the sequence of d_t),  d_t = logprobs_t - old_logprobs_t,
          min(d_t, log_clip_high) where A_i > 0,  max(d_t, -log_clip_low) where A_i < 0
    l_i = -s_i * A_i                                                                         L19
    L   = mean over sequences                                                                G2

A token that has moved too far gets no gradient while the rest of its sequence keeps learning; GSPO clips the whole
sequence. The bounds are on log-ratios and wide, since one outlier moves a geometric mean little.

Source: Zhao et al. 2507.20673; verl.
"""

from __future__ import annotations

import jax

from jrl.algos import common, grpo
from jrl.algos.contract import Facts, Tokens
from jrl.ops import geometric_mean, ratios, reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class GMPO:
    log_clip_low: float = 0.4  # nats: a token whose log-ratio is below -log_clip_low is not pushed down further
    log_clip_high: float = 0.4  # nats: a token whose log-ratio is above log_clip_high is not pushed up further
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus
    importance: common.TruncatedImportance | None = None  # correction for stale or mismatched samplers; None: none


def check(config: GMPO, facts: Facts) -> None:
    common.check_weighted(config, facts)
    hint = "a bound of the log-ratio in nats, which begins at 0. 0.4 is usual."
    common.check_positive(config, {"log_clip_low": hint, "log_clip_high": hint})


def token_loss(config: GMPO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    arrays = (tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.mask, tokens.segment)
    bounds = {"log_clip_low": config.log_clip_low, "log_clip_high": config.log_clip_high}
    loss = geometric_mean.gmpo(*arrays, num_segments=tokens.num_segments, **bounds)
    d, advantages = ratios.log_ratio(*arrays[:2], tokens.mask), reduce.masked(tokens.advantages, tokens.mask)
    binds = {
        "clip_fraction_low": (advantages < 0) & (d < -config.log_clip_low),
        "clip_fraction_high": (advantages > 0) & (d > config.log_clip_high),
    }
    return common.weighted_loss(config, loss, tokens, binds)


OBJECTIVE = grpo.OBJECTIVE._replace(config=GMPO, check=check, needs=common.entropy_needs, token_loss=token_loss)
