"""APO-down: both answers become less likely, the rejected one faster.

    l_u = sigmoid(beta u_w) + 1 - sigmoid(beta D)                                                       P15
    L   = mean over the pairs of the step

For a policy that is better than both answers of a pair. If the preferred answer is better than the policy, use APOZero.

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
class APODown:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1


def check(config: APODown, facts: Facts) -> None:
    positive("APODown.beta", config.beta, 0.1)


def loss(config: APODown, pair: Pair) -> Array:
    """Returns P15's APO-down of every pair, [..., S]."""
    return pair_losses.apo_down(pair.gain, pair.other_gain, config.beta)


OBJECTIVE = pair_objective(APODown, loss, check)
