"""APO-zero: the preferred answer becomes likelier than under the reference, the rejected one less likely.

    l_u = 1 - sigmoid(beta u_w) + sigmoid(beta u_l)                                                     P15
    L   = mean over the pairs of the step

For preferred answers that are better than the policy's own. If they are worse, use APODown.

Source: D'Oosterlinck et al. 2408.06266.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive
from jrl.ops import pair_losses
from jrl.types import traced

Array = jax.Array


@traced
class APOZero:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1


def check(config: APOZero, facts: Facts) -> None:
    positive("APOZero.beta", config.beta, 0.1)


def loss(config: APOZero, pair: Pair) -> Array:
    """Returns P15's APO-zero of every pair, [..., S]."""
    return pair_losses.apo_zero(pair.gain, pair.other_gain, config.beta)


OBJECTIVE = pair_objective(APOZero, loss, check)
