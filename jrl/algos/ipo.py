"""IPO: regress the margin to a finite target, so that a clear pair does not push the policy ever further.

    l_u = (D - 1 / (2 beta))^2                                                                            P8
    L   = mean over the pairs of the step

D is of log-ratios summed over an answer's tokens, or averaged; beta has a different scale in each. Peers: OpenRLHF and
TRL's CPO and XPO sum, TRL's DPO trainer and AReaL average.

Source: Azar et al. 2310.12036 eq. 17.
"""

from __future__ import annotations

from typing import Literal

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive
from jrl.ops import pair_losses
from jrl.types import traced

Array = jax.Array


@traced
class IPO:
    beta: float = 0.1  # the margin is drawn to 1 / (2 beta)
    over_tokens: Literal["sum", "mean"] = "sum"  # an answer's log-ratio: the sum or the mean over its tokens


def check(config: IPO, facts: Facts) -> None:
    positive("IPO.beta", config.beta, 0.1)


def loss(config: IPO, pair: Pair) -> Array:
    """Returns P8 of every pair, [..., S]."""
    if config.over_tokens == "sum":
        return pair_losses.ipo(pair.margin, config.beta)
    return pair_losses.ipo(pair.gain / pair.length - pair.other_gain / pair.other_length, config.beta)


OBJECTIVE = pair_objective(IPO, loss, check)
