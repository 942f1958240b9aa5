"""M2PO: GRPO on stale samples, without the tokens on which sampler and learner differ most.

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                                    A3
    A_t = 0 on the tokens with the largest (old_logprobs - behaviour_logprobs)^2,
          as many as leave a mean of at most `limit` on the rest                             L22
    l_t = max(-rho_t * A_t, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_t)                  L2
    L   = mean over all tokens of the step, dropped ones included                            G1

A bound on the second moment bounds the variance of the importance weights, and keeps rare tokens that a per-token clip
would stop. Tokens are dropped once per batch, over the whole step, by the policy before its updates.

Source: Zheng et al. 2510.01161; AReaL, with its decoupled loss: set `importance` for that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, contract, grpo
from jrl.algos.contract import Facts, Groups, Objective
from jrl.ops import reduce, trust_region
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class M2PO:
    limit: float = 0.04  # nats squared: largest mean of the squared log-ratio to the sampler
    clip_low: float = 0.2  # a ratio below 1 - clip_low is not pushed down further
    clip_high: float = 0.2  # a ratio above 1 + clip_high is not pushed up further
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus
    importance: common.TruncatedImportance | None = None  # correction for stale or mismatched samplers; None: none


def check(config: M2PO, facts: Facts) -> None:
    common.check_weighted(config, facts)
    common.check_ratio_bounds(config)
    common.check_positive(config, {"limit": "at 0 every token off the sampler's log-probs is dropped. 0.04 is usual."})


def advantages(config: M2PO, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    token_advantages, state, counters = grpo.advantages(config, groups, reward, state)
    mask = groups.action_mask & contract.eligible(groups)[:, None]
    inside = trust_region.within_second_moment(groups.old_logprobs, groups.behaviour_logprobs, mask, limit=config.limit)
    token_advantages = jnp.where(inside, token_advantages, 0)
    return token_advantages, state, counters | {"rejected": reduce.masked_mean(~inside, mask)}


OBJECTIVE = Objective(
    config=M2PO,
    check=check,
    corrects_staleness=lambda config: True,
    needs=lambda config: common.entropy_needs(config)._replace(credit_logprobs=True),
    advantages=advantages,
    token_loss=common.ppo_clip_token_loss,
)
