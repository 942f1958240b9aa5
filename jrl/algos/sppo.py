"""SPPO on hard labels: regress the preferred answer's log-ratio to 1 / (2 beta), the rejected one's to -1 / (2 beta).

    l_u = (u_w - 1 / (2 beta))^2 + (u_l + 1 / (2 beta))^2                                               P15
    L   = mean over the pairs of the step

Source: Wu et al. 2405.00675.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive
from jrl.ops import pair_losses
from jrl.types import traced

Array = jax.Array


@traced
class SPPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1


def check(config: SPPO, facts: Facts) -> None:
    positive("SPPO.beta", config.beta, 0.1)


def loss(config: SPPO, pair: Pair) -> Array:
    """Returns P15's SPPO of every pair, [..., S]."""
    return pair_losses.sppo(pair.gain, pair.other_gain, config.beta)


OBJECTIVE = pair_objective(SPPO, loss, check)
