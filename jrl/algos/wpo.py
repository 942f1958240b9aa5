"""WPO: DPO that counts a pair by how likely the policy would sample it, which makes stored pairs more like its own.

    l_u = min(1, exp(LPbar_w + LPbar_l)) * -log sigmoid(beta D), no gradient through the weight      P30, P5
    L   = mean over the pairs of the step

Source: Zhou et al. 2406.11827 eq. 4, with means over tokens; the paper's alignment of the weights is left out.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive
from jrl.ops import pair_losses
from jrl.types import traced

Array = jax.Array


@traced
class WPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1


def check(config: WPO, facts: Facts) -> None:
    positive("WPO.beta", config.beta, 0.1)


def loss(config: WPO, pair: Pair) -> Array:
    """Returns P30's weight times P5, of every pair, [..., S]."""
    weight = pair_losses.pair_weight(pair.mean_logprob, pair.other_mean_logprob)
    return weight * jax.nn.softplus(-config.beta * pair.margin)


OBJECTIVE = pair_objective(WPO, loss, check)
