"""f-DPO: DPO with a divergence other than the reverse KL, to keep more or fewer modes of the reference.

    l_u = -log sigmoid(beta (phi(u_w) - phi(u_l)))                                                      P14
    phi = (exp((a - 1) u) - 1) / (a - 1) of an alpha divergence: a = 1 is DPO's reverse KL, 0 the forward KL;
          log sigmoid(u) of the Jensen-Shannon divergence
    L   = mean over the pairs of the step

Source: Wang et al. 2309.16240 table 1; the paper's alpha is 1 - a. TRL defines a as we do.
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
class FDPO:
    beta: float = 0.1  # strength of the tie to the reference
    divergence: Literal["alpha", "jensen_shannon"] = "alpha"  # to the reference
    alpha: float = 0.5  # a, in [0, 1], of the alpha divergence: 1 is the reverse KL, 0 the forward KL


def check(config: FDPO, facts: Facts) -> None:
    positive("FDPO.beta", config.beta, 0.1)
    if not 0 <= config.alpha <= 1:
        raise ValueError(f"FDPO.alpha = {config.alpha} must be in [0, 1]: 1 is the reverse KL, 0 the forward KL.")


def loss(config: FDPO, pair: Pair) -> Array:
    """Returns P14 of every pair, [..., S]."""
    if config.divergence == "alpha":
        link = lambda u: pair_losses.alpha_link(u, config.alpha)
    else:
        link = pair_losses.jensen_shannon_link
    return jax.nn.softplus(-config.beta * (link(pair.gain) - link(pair.other_gain)))


OBJECTIVE = pair_objective(FDPO, loss, check)
