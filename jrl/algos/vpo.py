"""VPO, offline: DPO with pessimism, the policy held near what the data holds.

    l_u = -log sigmoid(beta D) - weight * beta * u_w                                                P5, P21
    L   = mean over the pairs of the step

The term is VPO's with the preferred answers as the calibration distribution and the sign of offline data; a large
weight is supervised fine-tuning on them.

Source: Cen et al. 2405.19320; sign and form as its abstract states them.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive
from jrl.types import traced

Array = jax.Array


@traced
class VPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1
    weight: float = 0.1  # alpha of the paper, above 0


def check(config: VPO, facts: Facts) -> None:
    positive("VPO.beta", config.beta, 0.1)
    positive("VPO.weight", config.weight, 0.1)


def loss(config: VPO, pair: Pair) -> Array:
    """Returns P5 plus P21's pessimistic term, of every pair, [..., S]."""
    return jax.nn.softplus(-config.beta * pair.margin) - config.weight * config.beta * pair.gain


OBJECTIVE = pair_objective(VPO, loss, check)
