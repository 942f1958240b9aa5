"""Decoupled PPO: GRPO on stale samples. The clip is around the policy before the updates; an importance weight corrects
for the older policy that sampled.

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                                    A3
    w_t = min(exp(old_logprobs_t - behaviour_logprobs_t), cap)
    l_t = w_t * max(-rho_t * A_i, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_i)            L11
    L   = mean over all tokens of the step                                                   G1

On policy w_t = 1, and it is GRPO's clip with the mean over tokens. Use it with a lag of 1 or more.

Source: Fu et al. 2505.24298 (AReaL) eq. 5, with a cap of 5. AReaL normalizes advantages over the batch.
"""

from __future__ import annotations

import jax

from jrl.algos import common, grpo
from jrl.algos.contract import Facts, Objective, Tokens
from jrl.ops import decoupled, importance
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class DecoupledPPO:
    clip_low: float = 0.2  # a ratio below 1 - clip_low is not pushed down further
    clip_high: float = 0.2  # a ratio above 1 + clip_high is not pushed up further
    cap: float = 2.0  # largest weight of a stale token
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus


def check(config: DecoupledPPO, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=True)
    common.check_ratio_bounds(config)
    common.check_entropy(config)
    common.check_positive(config, {"cap": "weights are cut to it, so that 0 removes the policy loss. 2.0 is usual."})


def token_loss(config: DecoupledPPO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    new, old, behaviour, mask = tokens.logprobs, tokens.old_logprobs, tokens.behaviour_logprobs, tokens.mask
    bounds = {"clip_low": config.clip_low, "clip_high": config.clip_high, "cap": config.cap}
    loss = decoupled.decoupled_clipped(new, old, behaviour, tokens.advantages, mask, **bounds)
    weights = importance.token_weights(old, behaviour, mask, cap=config.cap)
    weighting = {"importance_weight": weights, "importance_capped": weights >= config.cap}
    return common.unweighted_loss(config, loss, tokens, common.clip_metrics(config, tokens), weighting)


OBJECTIVE = Objective(
    config=DecoupledPPO,
    check=check,
    corrects_staleness=lambda config: True,
    needs=common.entropy_needs,
    advantages=grpo.advantages,
    token_loss=token_loss,
)
