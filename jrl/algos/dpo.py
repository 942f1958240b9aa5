"""DPO: preferences without a reward model, by the log-odds that the policy gives to the preferred answer of a pair.

    u   = LP(y) - LP_ref(y), summed over the answer's tokens; D = u_preferred - u_other                     P0
    l_u = -log sigmoid(beta * D)                                                                            P5
    L   = mean over the pairs of the step

The reference is the policy as the stage found it. Peers: TRL's and open-instruct's default loss is this one.

Source: Rafailov et al. 2305.18290 eq. 7; beta 0.1 as there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos.contract import Facts, Needs, Objective, Sequences
from jrl.algos.paired import of_pairs, pairs_of, positive
from jrl.ops import reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class DPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1


def check(config: DPO, facts: Facts) -> None:
    positive("DPO.beta", config.beta, 0.1)


def sequence_loss(config: DPO, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P5, -log sigmoid(beta * D), on the preferred sequence of each pair, [..., S], and metrics."""
    pair = pairs_of(sequences)
    metrics = {
        "dpo/accuracy": jnp.where(pair.margin == 0, 0.5, pair.margin > 0),
        "dpo/margin": config.beta * pair.margin,
        "dpo/preferred": pair.gain,
        "dpo/other": pair.other_gain,
    }
    return reduce.masked(jax.nn.softplus(-config.beta * pair.margin), pair.mask), of_pairs(metrics, pair)


OBJECTIVE = Objective(
    config=DPO,
    check=check,
    needs=lambda config: Needs(reference=True),
    sequence_loss=sequence_loss,
    unit_size=2,
)
