"""Online IPO: IPO on pairs of each prompt's best and worst sample.

    pair of a group as in OnlineDPO                                                                       F15
    l_u = (D - (2 p - 1) / (2 beta))^2, p = 1                                                             P8, P16
    L   = mean over the pairs of the step

The margin is regressed to 1 / (2 beta), so that answers that always win do not diverge. With `OnlineIPO.preference =
'pair_model'` p is the strength of the pair model's preference: the loss is the mean over labels drawn from p, up to a
constant, so the target of the margin is (p - 1/2) / beta.

Sources: Calandriello et al. 2403.08635, with sampled pairs instead of all pairs; TRL's online trainers call it "ipo".
Azar et al. 2310.12036 eq. 17 and 9, where p is any preference.
"""

from __future__ import annotations

import dataclasses

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
    """Returns P8 of every sampled pair (P16), [..., S], by its strength."""
    # 1 / (2 (beta / c)) = c / (2 beta); c is 1 where the label is certain.
    return ipo.loss(dataclasses.replace(config, beta=config.beta / certainty(pair)), pair)


def certainty(pair: Pair) -> Array:
    """Returns 2 p - 1 of every pair, [..., S] in (0, 1]: the mean of a label of 1 or -1 drawn from p."""
    return 2 * pair.preference - 1


OBJECTIVE = sampled_pairs.sampled_pair_objective(OnlineIPO, pair_loss(loss), check, strengths=True)
