"""CPO: DPO with a uniform reference, plus imitation of the preferred answer.

    l_u = -log sigmoid(beta (LP_w - LP_l)) - weight * LPbar_w                                       P5, P30
    L   = mean over the pairs of the step

Source: CPO 2401.08417 eq. 6; the NLL is a mean over the answer's tokens, as in TRL.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive
from jrl.types import traced

Array = jax.Array


@traced
class CPO:
    beta: float = 0.1  # log-odds for a difference of 1 nat between the answers
    weight: float = 1.0  # of the preferred answer's NLL


def check(config: CPO, facts: Facts) -> None:
    positive("CPO.beta", config.beta, 0.1)
    if not config.weight >= 0:
        raise ValueError(f"CPO.weight = {config.weight} must not be negative; 1 is usual.")


def loss(config: CPO, pair: Pair) -> Array:
    """Returns P5 without a reference plus P30's NLL, of every pair, [..., S]."""
    return jax.nn.softplus(-config.beta * pair.margin) - config.weight * pair.mean_logprob


OBJECTIVE = pair_objective(CPO, loss, check, reference=False)
