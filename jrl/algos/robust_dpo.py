"""Robust DPO: an unbiased estimate, from randomly flipped labels, of DPO's loss on the true labels.

    l_u = ((1 - noise) l(beta D) - noise l(-beta D)) / (1 - 2 noise),  l(m) = -log sigmoid(m)          P7
    L   = mean over the pairs of the step; it may be negative

Source: Chowdhury et al. 2403.00409.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive, share
from jrl.ops import pair_losses
from jrl.types import traced

Array = jax.Array


@traced
class RobustDPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1
    noise: float = 0.1  # share of flipped labels, below 0.5


def check(config: RobustDPO, facts: Facts) -> None:
    positive("RobustDPO.beta", config.beta, 0.1)
    share("RobustDPO.noise", config.noise, 0.1)


def loss(config: RobustDPO, pair: Pair) -> Array:
    """Returns P7 of every pair, [..., S]."""
    return pair_losses.robust(config.beta * pair.margin, config.noise)


OBJECTIVE = pair_objective(RobustDPO, loss, check)
