"""TwoSidedGRPO: GRPO whose ratio is bounded from above for negative advantages too.

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                                    A3
    l_t = -min(min(rho_t, delta) * A_i, clip(rho_t, 1 - clip_low, 1 + clip_high) * A_i)       L4
    L   = mean over sequences of the mean over their tokens                                   G2

PPO's clip leaves a token's loss unbounded if A < 0 and the ratio is large: one such token can ruin a step. Here its
ratio is capped at delta, without a gradient.

Source: INTELLECT-2, 2505.07291 section 3.4, delta 4; TRL's `delta`. The dual clip (GRPO.dual_clip) bounds the loss of
the same tokens.
"""

from __future__ import annotations

import jax

from jrl.algos import common, grpo
from jrl.algos.contract import Facts, Objective, Tokens
from jrl.ops import reduce, surrogate
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class TwoSidedGRPO:
    clip_low: float = 0.2  # a ratio below 1 - clip_low is not pushed down further
    clip_high: float = 0.2  # a ratio above 1 + clip_high is not pushed up further
    delta: float = 4.0  # largest ratio where A < 0, above 1 + clip_high
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus
    importance: common.TruncatedImportance | None = None  # correction for stale or mismatched samplers; None: none


def check(config: TwoSidedGRPO, facts: Facts) -> None:
    common.check_weighted(config, facts)
    common.check_ratio_bounds(config)
    if not config.delta > 1 + config.clip_high:
        raise ValueError(
            f"TwoSidedGRPO.delta = {config.delta} must exceed 1 + clip_high = {1 + config.clip_high}: below it PPO's "
            "clip bounds the ratio already. 4.0 is usual."
        )


def token_loss(config: TwoSidedGRPO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    bounds = {"clip_low": config.clip_low, "clip_high": config.clip_high, "delta": config.delta}
    loss = surrogate.capped(tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.mask, **bounds)
    return common.weighted_loss(config, loss, tokens, common.clip_metrics(config, tokens))


OBJECTIVE = Objective(
    config=TwoSidedGRPO,
    check=check,
    advantages=grpo.advantages,
    token_loss=token_loss,
    weights=lambda config, loss_mask, max_completion: reduce.inverse_length_weights(loss_mask),
    denominator=lambda config, loss_mask, rows, max_completion: reduce.count_sequences(loss_mask),
    needs=common.entropy_needs,
    corrects_staleness=common.has_importance,
)
