"""EXO: the reverse KL between the policy's preference and the label, where DPO has the forward KL.

    l_u = KL((sigmoid(beta D), sigmoid(-beta D)) from (1 - noise, noise))                               P15
    L   = mean over the pairs of the step

Source: Ji et al. 2402.00856.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive, share
from jrl.ops import pair_losses
from jrl.types import traced

Array = jax.Array


@traced
class EXO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1
    noise: float = 1e-3  # probability that the label gives to the other answer, above 0


def check(config: EXO, facts: Facts) -> None:
    positive("EXO.beta", config.beta, 0.1)
    positive("EXO.noise", config.noise, 1e-3)
    share("EXO.noise", config.noise, 1e-3)


def loss(config: EXO, pair: Pair) -> Array:
    """Returns P15's EXO of every pair, [..., S]."""
    return pair_losses.exo(config.beta * pair.margin, config.noise)


OBJECTIVE = pair_objective(EXO, loss, check)
