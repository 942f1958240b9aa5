"""Conservative DPO: DPO with soft labels, from a known rate of label noise or from preference strengths.

    p   = label * (1 - noise) + (1 - label) * noise
    l_u = -p log sigmoid(beta D) - (1 - p) log sigmoid(-beta D)                                    P6, P29
    L   = mean over the pairs of the step

With hard labels (1) this is cDPO; with a judge's preference strengths as labels (Preferences.strength) and no noise it
is the loss of OSP. Data sources leave out pairs without a preference (0.5). Peers: TRL's "sigmoid" ignores its
`label_smoothing`; open-instruct and OpenRLHF have this form.

Sources: Mitchell, "A note on DPO with noisy preferences" (2023); OSP 2405.14103.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive, share
from jrl.ops import pair_losses
from jrl.types import traced

Array = jax.Array


@traced
class ConservativeDPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1
    noise: float = 0.1  # probability that a label is wrong; 0 takes the labels' own strengths alone


def check(config: ConservativeDPO, facts: Facts) -> None:
    positive("ConservativeDPO.beta", config.beta, 0.1)
    share("ConservativeDPO.noise", config.noise, 0.1)


def loss(config: ConservativeDPO, pair: Pair) -> Array:
    """Returns P6 (P29 with soft labels) of every pair, [..., S]."""
    p = pair.preference * (1 - config.noise) + (1 - pair.preference) * config.noise
    return pair_losses.soft_preference(config.beta * pair.margin, p)


OBJECTIVE = pair_objective(ConservativeDPO, loss, check)._replace(strengths=True)
