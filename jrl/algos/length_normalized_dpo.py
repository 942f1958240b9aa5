"""Length-normalized DPO: DPO on mean log-ratios, so that long answers do not get a larger margin.

    l_u = -log sigmoid(beta (u_w / len_w - u_l / len_l))                                                P13
    L   = mean over the pairs of the step

Source: Tulu 3, 2411.15124 section 5.1 (open-instruct's `dpo_norm`), beta 5.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive
from jrl.types import traced

Array = jax.Array


@traced
class LengthNormalizedDPO:
    beta: float = 5.0  # log-odds for a difference of 1 nat a token


def check(config: LengthNormalizedDPO, facts: Facts) -> None:
    positive("LengthNormalizedDPO.beta", config.beta, 5)


def loss(config: LengthNormalizedDPO, pair: Pair) -> Array:
    """Returns P13 of every pair, [..., S]."""
    margin = pair.gain / pair.length - pair.other_gain / pair.other_length
    return jax.nn.softplus(-config.beta * margin)


OBJECTIVE = pair_objective(LengthNormalizedDPO, loss, check)
