"""High-entropy tokens (80/20): DAPO's loss on the tokens with the highest entropy only.

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                                    A3
    A_t = 0 on tokens whose entropy is below the (1 - share) quantile of the step            L23
    l_t = max(-rho_t * A_t, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_t)                  L2
    L   = mean over all tokens of the step, low-entropy ones included                        G1

The entropies are those under the weights before a batch's updates, and their quantile is over the whole step. Computing
them takes an extra pass if a batch has one update.

Source: Wang et al. 2506.01939, share 0.2 with DAPO's clips; TRL. There the quantile is per micro-batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, contract, grpo
from jrl.algos.contract import Facts, Groups, Objective
from jrl.ops import reduce, token_selection
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class HighEntropyTokens:
    share: float = 0.2  # of the tokens, those with the largest entropy, that learn
    clip_low: float = 0.2  # a ratio below 1 - clip_low is not pushed down further
    clip_high: float = 0.28  # a ratio above 1 + clip_high is not pushed up further
    entropy_bonus: float | None = None  # coefficient of the entropy bonus, on all tokens; None: no bonus
    importance: common.TruncatedImportance | None = None  # correction for stale or mismatched samplers; None: none


def check(config: HighEntropyTokens, facts: Facts) -> None:
    common.check_weighted(config, facts)
    common.check_ratio_bounds(config)
    if not 0 < config.share <= 1:
        raise ValueError(
            f"HighEntropyTokens.share = {config.share} must lie in (0, 1]: the share of tokens that learn. "
            "0.2 is usual."
        )


def advantages(
    config: HighEntropyTokens, groups: Groups, reward: Array, state: PyTree
) -> tuple[Array, PyTree, dict[str, Array]]:
    token_advantages, state, counters = grpo.advantages(config, groups, reward, state)
    mask = groups.action_mask & contract.eligible(groups)[:, None]
    selected = token_selection.high_entropy(groups.old_entropy, mask, share=config.share)
    counters |= {
        "selected": reduce.masked_mean(selected, mask),
        "selected_entropy": reduce.masked_mean(groups.old_entropy, selected),
    }
    return jnp.where(selected, token_advantages, 0), state, counters


OBJECTIVE = Objective(
    config=HighEntropyTokens,
    check=check,
    corrects_staleness=common.has_importance,
    needs=lambda config: common.entropy_needs(config)._replace(credit_entropy=True),
    advantages=advantages,
    token_loss=common.ppo_clip_token_loss,
)
