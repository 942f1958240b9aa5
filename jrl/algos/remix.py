"""ReMix: GRPO on samples of an earlier policy, clipped around the latest policy.

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                                    A3
    rho_t = exp(logprobs_t - behaviour_logprobs_t), c_t = exp(old_logprobs_t - behaviour_logprobs_t)
    l_t = -min(rho_t * A_i, clip(rho_t, c_t - clip, c_t + clip) * A_i)                        L12
          + kl * (lambda * k2(reference) + (1 - lambda) * k2(policy before the step)), lambda from 1 to 0.5     K6
    L   = mean over all tokens of the step                                                   G1

Use it with a lag of 1, since the ratio of tokens with a negative advantage is unbounded. On policy c = 1, and it is
PPO's clip. The ratio is to the policy that drew the token, so there is no separate importance weight.

Both KL terms are estimated by k2, whose gradient on the policy's own samples is that of the KL; k3's is not (K2). On
samples of an earlier policy the ratio to it is missing, as in GRPO's KL. The second term is relative to the weights
before the step's updates, so it is 0 until the second update of a batch. Online.reset_reference_every moves the
reference.

Source: ReMix, 2507.06892: a share of 0.4 of the rows is from the last 2 policies, 2 updates per batch, and training
ends with fresh rows only. Here all rows are `lag` versions old, and the KL is off by default.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, grpo
from jrl.algos.contract import Facts, Needs, Objective, Tokens
from jrl.ops import kl, mix_policy, reference
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class ReMix:
    clip: float = 0.2  # how far a ratio may move from where the update begins
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus
    # coefficient of the KL to the reference and to the policy of the step before, by a share that moves; None: no KL
    kl: float | None = None


def check(config: ReMix, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=True)
    common.check_entropy(config)
    if config.kl is not None:
        common.check_positive(config, {"kl": "at 0 a reference would be run for nothing; None is no KL."})
    common.check_positive(config, {"clip": "at 0 no token has a gradient. 0.2 is usual."})
    if facts.truncated_sampling:
        raise ValueError(
            "ReMix compares with the distribution that the tokens were drawn from, which top-k, top-p and min-p cut: "
            "ratios would not begin at 1. Leave them out, or use DecoupledPPO, whose weights are bounded."
        )


def token_loss(config: ReMix, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    arrays = (tokens.logprobs, tokens.old_logprobs, tokens.behaviour_logprobs, tokens.advantages, tokens.mask)
    loss, metrics = common.unweighted_loss(config, mix_policy.mix_policy_clipped(*arrays, clip=config.clip), tokens)
    if config.kl is None:
        return loss, metrics
    to_base = kl.k2(tokens.logprobs, tokens.ref_logprobs, tokens.mask)
    to_previous = kl.k2(tokens.logprobs, tokens.old_logprobs, tokens.mask)
    mixed = reference.mixed_kl(to_base, to_previous, state)
    return loss + config.kl * mixed, metrics | common.metrics_of(tokens, {"kl_mixed": mixed})


def needs(config: ReMix) -> Needs:
    return common.entropy_needs(config)._replace(reference=config.kl is not None)


OBJECTIVE = Objective(
    config=ReMix,
    check=check,
    needs=needs,
    init_state=lambda config: () if config.kl is None else jnp.int32(0),  # steps so far, which set the share
    advantages=grpo.advantages,
    token_loss=token_loss,
    next_state=lambda config, state, metrics: state if config.kl is None else state + 1,
)
