"""LD-DPO: length-desensitized DPO, which down-weights an answer's tokens beyond the length of the other answer.

    u^a = u of the first n tokens + alpha * u of the others,  n = min(len_w, len_l)                          P13
    l_u = -log sigmoid(beta (u^a_w - u^a_l))                                                                 P13
    L   = mean over the pairs of the step

alpha = 1 is DPO, alpha = 0 compares only the common length.

Source: LD-DPO, Liu et al. 2409.06411.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts, Needs, Objective, Sequences, other_of_pair
from jrl.algos.paired import gains, pair_metrics, pairs_of, positive
from jrl.ops import pair_losses, reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class LDDPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin of 1
    alpha: float = 0.5  # weight of the tokens beyond the common length, in [0, 1]


def check(config: LDDPO, facts: Facts) -> None:
    positive("LDDPO.beta", config.beta, 0.1)
    if not 0 <= config.alpha <= 1:
        raise ValueError(f"LDDPO.alpha = {config.alpha} must be from 0 (the common length alone) to 1 (DPO).")


def sequence_loss(config: LDDPO, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P13's LD-DPO on the preferred sequence of each pair, [..., S], and metrics."""
    pair = pairs_of(sequences)
    common = reduce.masked(sequences.common_gain, sequences.mask)
    gain = pair_losses.desensitized(gains(sequences), common, config.alpha)
    loss = jax.nn.softplus(-config.beta * (gain - other_of_pair(gain, sequences)))
    return reduce.masked(loss, pair.mask), pair_metrics(pair)


OBJECTIVE = Objective(
    config=LDDPO,
    check=check,
    needs=lambda config: Needs(reference=True, common_length=True),
    sequence_loss=sequence_loss,
    unit_size=2,
)
