"""RPO: DPO plus imitation of the preferred answer, so that its likelihood does not fall while the margin grows.

    l_u = -log sigmoid(beta D) - weight * LPbar_w                                                   P5, P30
    L   = mean over the pairs of the step

Source: Pang et al. 2404.19733 eq. 1.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive
from jrl.types import traced

Array = jax.Array


@traced
class RPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1
    weight: float = 1.0  # of the preferred answer's NLL, a mean over its tokens


def check(config: RPO, facts: Facts) -> None:
    positive("RPO.beta", config.beta, 0.1)
    positive("RPO.weight", config.weight, 1.0)


def loss(config: RPO, pair: Pair) -> Array:
    """Returns P5 plus P30's NLL, of every pair, [..., S]."""
    return jax.nn.softplus(-config.beta * pair.margin) - config.weight * pair.mean_logprob


OBJECTIVE = pair_objective(RPO, loss, check)
