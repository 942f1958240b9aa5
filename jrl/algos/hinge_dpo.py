"""Hinge loss on preferences (SLiC-HF with DPO's margin): a pair with a large enough margin has no gradient.

    l_u = max(0, 1 - beta D)                                                                              P9
    L   = mean over the pairs of the step

Source: SLiC-HF 2305.10425; the margin to a reference as in TRL's "hinge".
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive
from jrl.ops import pair_losses
from jrl.types import traced

Array = jax.Array


@traced
class HingeDPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1


def check(config: HingeDPO, facts: Facts) -> None:
    positive("HingeDPO.beta", config.beta, 0.1)


def loss(config: HingeDPO, pair: Pair) -> Array:
    """Returns P9 of every pair, [..., S]."""
    return pair_losses.hinge(config.beta * pair.margin)


OBJECTIVE = pair_objective(HingeDPO, loss, check)
