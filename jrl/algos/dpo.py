"""DPO: learn preferences without a reward model, from the policy's log-odds for the preferred answer of a pair.

    u   = LP(y) - LP_ref(y), summed over the answer's tokens; D = u_preferred - u_other                     P0
    l_u = -log sigmoid(beta * D)                                                                            P5
    L   = mean over the pairs of the step

The reference is the initial policy of the stage. This is the default loss of TRL and open-instruct.

Source: Rafailov et al. 2305.18290 eq. 7; beta 0.1 as there.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive
from jrl.types import traced

Array = jax.Array


@traced
class DPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1


def check(config: DPO, facts: Facts) -> None:
    positive("DPO.beta", config.beta, 0.1)


def loss(config: DPO, pair: Pair) -> Array:
    """Returns P5, -log sigmoid(beta * D), of every pair, [..., S]."""
    return jax.nn.softplus(-config.beta * pair.margin)


OBJECTIVE = pair_objective(DPO, loss, check)
