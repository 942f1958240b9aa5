"""SAPO: GRPO with a soft gate instead of the clip.

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                                    A3
    l_t = -4 / tau * sigmoid(tau * (rho_t - 1)) * A_i                                        L18
    L   = mean over sequences of the mean over their tokens                                  G2

tau is `positive_temperature` where A_i > 0, `negative_temperature` elsewhere: a larger one closes the gate sooner. On
the policy's own samples the gradient is GRPO's.

Source: Gao et al. 2511.20347, as in verl.
"""

from __future__ import annotations

import jax

from jrl.algos import common, grpo
from jrl.algos.contract import Facts, Tokens
from jrl.ops import gates
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class SAPO:
    positive_temperature: float = 1.0  # how fast the gate closes where the advantage is above 0
    negative_temperature: float = 1.05  # and where it is below
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus
    importance: common.TruncatedImportance | None = None  # correction for stale or mismatched samplers; None: none


def check(config: SAPO, facts: Facts) -> None:
    common.check_weighted(config, facts)
    hint = "at 0 the gate is flat, and divides by it. 1.0 and 1.05 are usual."
    common.check_positive(config, {"positive_temperature": hint, "negative_temperature": hint})


def token_loss(config: SAPO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    arrays = (tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.mask)
    temperatures = {
        "positive_temperature": config.positive_temperature,
        "negative_temperature": config.negative_temperature,
    }
    return common.weighted_loss(config, gates.soft_gated(*arrays, **temperatures), tokens)


OBJECTIVE = grpo.OBJECTIVE._replace(config=SAPO, check=check, needs=common.entropy_needs, token_loss=token_loss)
