"""SimPO: preferences by mean log-probs, without a reference, with a target margin.

    l_u = -log sigmoid(beta (LPbar_w - LPbar_l) - gamma)                                                P12
    L   = mean over the pairs of the step

Peers: open-instruct configures gamma / beta (0.3); TRL's CPO trainer adds an NLL term of weight 1 by default.

Source: SimPO 2405.14734 eq. 6.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive
from jrl.ops import pair_losses
from jrl.types import traced

Array = jax.Array


@traced
class SimPO:
    beta: float = 2.0  # log-odds for a difference of 1 nat a token
    gamma: float = 1.0  # log-odds that must be won before the loss is that of a tie


def check(config: SimPO, facts: Facts) -> None:
    name = type(config).__name__
    positive(f"{name}.beta", config.beta, 2)
    if not config.gamma >= 0:
        raise ValueError(f"{name}.gamma = {config.gamma} must not be negative; 1 is usual.")


def loss(config: SimPO, pair: Pair) -> Array:
    """Returns P12 of every pair, [..., S]."""
    return pair_losses.simpo(pair.mean_logprob, pair.other_mean_logprob, config.beta, config.gamma)


OBJECTIVE = pair_objective(SimPO, loss, check, reference=False)
