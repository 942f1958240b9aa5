"""NCA: raise the preferred answer's log-ratio to the reference, and keep both log-ratios from drifting.

    l_u = -log sigmoid(beta u_w) - (log sigmoid(-beta u_w) + log sigmoid(-beta u_l)) / 2                P15
    L   = mean over the pairs of the step

Unlike DPO, it keeps the likelihood of the preferred answer from falling.

Source: Chen et al. 2402.05369, two answers.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive
from jrl.ops import pair_losses
from jrl.types import traced

Array = jax.Array


@traced
class NCA:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1


def check(config: NCA, facts: Facts) -> None:
    positive("NCA.beta", config.beta, 0.1)


def loss(config: NCA, pair: Pair) -> Array:
    """Returns P15's NCA of every pair, [..., S]."""
    return pair_losses.nca(pair.gain, pair.other_gain, config.beta)


OBJECTIVE = pair_objective(NCA, loss, check)
