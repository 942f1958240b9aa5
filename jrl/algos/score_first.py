"""SCoRe's first stage: train the second attempt, and keep the first one close to the reference.

    A_i1 = 0,  A_i2 = R_i - mean_g(R) on the tokens of the second attempt                    S17, R24, A21
    l_t  = max(-rho_t * A_t, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_t)                 L2 (L3)
           + (kl + first_kl on the tokens of the first attempt) * k2_t                       K2
    L    = mean over all tokens of the step                                                  G1

This decouples the attempts: the policy learns to correct the first answers of the initial policy. SCoRe continues from
there. `Online.strategy = @SelfCorrection()` draws the attempts.

Source: Kumar et al. 2409.12917 section 4.1: 0.1 on the first attempt for mathematics, 0.25 for code.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, score
from jrl.algos.contract import Facts, Groups, Tokens
from jrl.ops import kl, reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class SCoReFirst(common.Clipped):
    kl: float = 0.01  # coefficient of the KL to the reference
    first_kl: float = 0.1  # what is added to it on the first attempt


def check(config: SCoReFirst, facts: Facts) -> None:
    common.check_clipped(config, facts)
    score.check_attempts(config, facts)
    common.check_positive(config, {"first_kl": "it keeps the first attempt as it was. 0.1 is usual."})


def advantages(
    config: SCoReFirst, groups: Groups, reward: Array, state: PyTree
) -> tuple[Array, PyTree, dict[str, Array]]:
    return score.turn_rewards(groups, jnp.zeros_like(reward), reward), state, score.counters(groups, reward)


def token_loss(config: SCoReFirst, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    loss, metrics = common.clipped_token_loss(config, tokens, state)
    coefficient = config.kl + jnp.where(tokens.selected, reduce.widen(config.first_kl), 0)
    return loss + coefficient * kl.k2(tokens.logprobs, tokens.ref_logprobs, tokens.mask), metrics


OBJECTIVE = score.OBJECTIVE._replace(
    config=SCoReFirst,
    check=check,
    advantages=advantages,
    select=lambda config, groups, advantages: groups.action_mask & (groups.turn == 0),
    token_loss=token_loss,
)
