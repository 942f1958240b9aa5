"""ORPO: imitate the preferred answer and raise its odds against the rejected one, without a reference.

    l_u = -LPbar_w - weight * log sigmoid(o_w - o_l),  o = LPbar - log(1 - exp(LPbar))                  P11
    L   = mean over the pairs of the step

LPbar is the mean over the answer's tokens. Peers: TRL's and Tunix's NLL term includes the prompt's tokens by default.

Source: ORPO 2403.07691 eq. 6 and 7.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive
from jrl.ops import pair_losses
from jrl.types import traced

Array = jax.Array


@traced
class ORPO:
    weight: float = 0.1  # of the odds' term; lambda in the paper


def check(config: ORPO, facts: Facts) -> None:
    positive("ORPO.weight", config.weight, 0.1)


def loss(config: ORPO, pair: Pair) -> Array:
    """Returns P11 of every pair, [..., S]."""
    odds = pair_losses.log_odds(pair.mean_logprob) - pair_losses.log_odds(pair.other_mean_logprob)
    return -pair.mean_logprob + config.weight * jax.nn.softplus(-odds)


OBJECTIVE = pair_objective(ORPO, loss, check, reference=False)
