"""Online SimPO: SimPO on pairs of each prompt's best and worst sample.

    pair of a group as in OnlineDPO                                                                       F15
    l_u = -log sigmoid(beta (LPbar_w - LPbar_l) - gamma)                                                  P12, P17
    L   = mean over the pairs of the step

Source: SimPO 2405.14734 on pairs of the policy's own samples, as in CycleResearcher 2411.00816, which ranks them by a
reviewer's scores.
"""

from __future__ import annotations

import jax

from jrl.algos import sampled_pairs, simpo
from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_loss
from jrl.algos.sampled_pairs import Pairing
from jrl.types import traced

Array = jax.Array


@traced
class OnlineSimPO(Pairing, simpo.SimPO):
    pass


def check(config: OnlineSimPO, facts: Facts) -> None:
    sampled_pairs.check_pairing(config, facts)
    simpo.check(config, facts)


def loss(config: OnlineSimPO, pair: Pair) -> Array:
    """Returns P12 of every sampled pair (P17), [..., S]."""
    return simpo.loss(config, pair)


OBJECTIVE = sampled_pairs.sampled_pair_objective(OnlineSimPO, pair_loss(loss), check, reference=False)
