"""DPPO: a trust region on the probability instead of the ratio; tokens outside it are dropped from the loss.

    A_i = R_i - mean_g                                                                       A4
    q_t = exp(logprobs_t) - exp(behaviour_logprobs_t)
    l_t = -sg(exp(logprobs_t - behaviour_logprobs_t)) * A_i * logprobs_t                     L21
          0 where A_i > 0 and q_t > delta, or A_i < 0 and q_t < -delta
    L   = mean over all tokens of the step, dropped ones included                            G1

A ratio of 3 means little for a token of probability 1e-5 and much for one of 0.3. The ratio is to the sampler's
log-probs, so there is no separate importance weight.

Source: prime-rl's default loss, delta 0.2 (its documentation describes a clip of the ratio); verl.
"""

from __future__ import annotations

import jax

from jrl.algos import common, dr_grpo
from jrl.algos.contract import Facts, Objective, Tokens
from jrl.ops import trust_region
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class DPPO:
    delta: float = 0.2  # how far a token's probability may move to where its advantage pushes it
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus


def check(config: DPPO, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=True)
    common.check_entropy(config)
    if not 0 < config.delta < 1:
        raise ValueError(
            f"DPPO.delta = {config.delta} must lie in (0, 1): it is a difference of probabilities. 0.2 is usual."
        )
    if facts.truncated_sampling:
        raise ValueError(
            "DPPO compares a token's probability with the one it was drawn with, which top-k, top-p and min-p raise: "
            "tokens of a policy that has not moved would be dropped. Leave them out, or use DrGRPO."
        )


def token_loss(config: DPPO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    arrays = (tokens.logprobs, tokens.behaviour_logprobs, tokens.advantages, tokens.mask)
    loss = trust_region.dppo(*arrays, delta=config.delta)
    dropped = ~trust_region.within_probability(*arrays, delta=config.delta)
    return common.unweighted_loss(config, loss, tokens, {"rejected": dropped})


OBJECTIVE = Objective(
    config=DPPO, check=check, needs=common.entropy_needs, advantages=dr_grpo.advantages, token_loss=token_loss
)
