"""GSPO-token: GSPO with an advantage per token.

    s_t = sg(s_i) * exp(logprobs_t - sg(logprobs_t)), s_i = exp(mean over the sequence of logprobs - old_logprobs)
    l_t = max(-s_t * A_t, -clip(s_t, 1 - clip_low, 1 + clip_high) * A_t)                     L6
    L   = mean over sequences of the mean over their tokens                                  G2

If all tokens of a sequence share one advantage, value and gradient equal GSPO's. Everything else is GSPO.

Source: Zheng et al. 2507.18071 eq. 13 and 14; the form that verl calls GSPO.
"""

from __future__ import annotations

import jax

from jrl.algos import common, gspo
from jrl.algos.contract import Tokens
from jrl.algos.gspo import GSPO
from jrl.ops import sequence_ratio
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class GSPOToken(GSPO):
    """Fields and checks as in GSPO."""


def token_loss(config: GSPOToken, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    loss = sequence_ratio.gspo_token(
        tokens.logprobs,
        tokens.old_logprobs,
        tokens.advantages,
        tokens.mask,
        tokens.segment,
        num_segments=tokens.num_segments,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
    return common.weighted_loss(config, loss, tokens, gspo.ratio_metrics(config, tokens))


OBJECTIVE = gspo.OBJECTIVE._replace(config=GSPOToken, token_loss=token_loss)
