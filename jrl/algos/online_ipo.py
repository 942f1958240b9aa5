"""Online IPO: of each prompt's samples the best is preferred to the worst, and IPO learns from these pairs.

    pair of a group as in OnlineDPO                                                                       F15
    l_u = (D - 1 / (2 beta))^2                                                                            P8, P16
    L   = mean over the pairs of the step

The margin is drawn to 1 / (2 beta) and stays there, so that answers that always win do not run away.

Source: Calandriello et al. 2403.08635, with sampled pairs in the place of all; TRL's online trainers have it as "ipo".
"""

from __future__ import annotations

import jax

from jrl.algos import ipo, sampled_pairs
from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_loss, positive
from jrl.algos.sampled_pairs import Pairing
from jrl.types import traced

Array = jax.Array


@traced
class OnlineIPO(Pairing, ipo.IPO):
    pass


def check(config: OnlineIPO, facts: Facts) -> None:
    sampled_pairs.check_pairing(config, facts)
    positive("OnlineIPO.beta", config.beta, 0.1)


def loss(config: OnlineIPO, pair: Pair) -> Array:
    """Returns P8 of every sampled pair (P16), [..., S]."""
    return ipo.loss(config, pair)


OBJECTIVE = sampled_pairs.sampled_pair_objective(OnlineIPO, pair_loss(loss), check)
