"""CISPO: the importance ratio is a capped weight, not a clipped term, so that no token loses its gradient.

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                                    A3
    l_t = -sg(min(rho_t, max_weight)) * A_i * logprobs_t                                     L8
    L   = mean over all tokens of the step                                                   G1

PPO's clip removes rare tokens that become likely (a "However", a "Wait") from the loss after the first update. Here
they keep a gradient, with a bounded weight.

Source: MiniMax-M1, 2506.13585 eq. 4 and 5; max_weight 5 as in ScaleRL. It is absolute; in verl and slime the cap is
1 + epsilon.
"""

from __future__ import annotations

import jax

from jrl.algos import common, grpo
from jrl.algos.contract import Facts, Objective, Tokens
from jrl.ops import ratios, surrogate
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class CISPO:
    max_weight: float = 5.0  # largest ratio that a token's gradient is weighted by
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus
    importance: common.TruncatedImportance | None = None  # correction for stale or mismatched samplers; None: none


def check(config: CISPO, facts: Facts) -> None:
    common.check_weighted(config, facts)
    if not config.max_weight >= 1:
        raise ValueError(
            f"CISPO.max_weight = {config.max_weight} must be at least 1: it is the largest weight itself, not what a "
            "ratio may exceed 1 by, and below 1 it would shrink every token's gradient. 5.0 is usual."
        )


def token_loss(config: CISPO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    arrays = (tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.mask)
    loss = surrogate.cispo(*arrays, max_weight=config.max_weight)
    capped = ratios.ratio(tokens.logprobs, tokens.old_logprobs, tokens.mask) > config.max_weight
    return common.weighted_loss(config, loss, tokens, {"weight_cut": capped})


OBJECTIVE = Objective(
    config=CISPO,
    check=check,
    corrects_staleness=common.has_importance,
    needs=common.entropy_needs,
    advantages=grpo.advantages,
    token_loss=token_loss,
)
