"""CPL: contrastive preference learning, which models preferences as regret under the policy, without a reference.

    l_u = -log(exp(alpha LP_w) / (exp(alpha LP_w) + exp(bias * alpha LP_l)))                            P26
    L   = mean over the pairs of the step

LP are sums, so long answers weigh more: use pairs of about equal length.

Source: Hejna et al. 2310.13639 eq. 5, discount 1.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive
from jrl.ops import pair_losses
from jrl.types import traced

Array = jax.Array


@traced
class CPL:
    alpha: float = 0.1  # temperature of the regret
    bias: float = 0.5  # weight of the other answer, in (0, 1]; 1 is symmetric


def check(config: CPL, facts: Facts) -> None:
    positive("CPL.alpha", config.alpha, 0.1)
    if not 0 < config.bias <= 1:
        raise ValueError(f"CPL.bias = {config.bias} must be above 0 and at most 1; 0.5 is usual.")


def loss(config: CPL, pair: Pair) -> Array:
    """Returns P26 of every pair, [..., S]."""
    return pair_losses.cpl(pair.logprob, pair.other_logprob, config.alpha, config.bias)


OBJECTIVE = pair_objective(CPL, loss, check, reference=False)
