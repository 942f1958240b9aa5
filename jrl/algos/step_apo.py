"""Step-APO: prefer the better of two next steps from one state, with a margin that grows with its advantage.

    D_s = log-ratio of the better step to the reference minus that of the other, over the steps' tokens
    l_u = -log sigmoid(beta D_s - scale (Q_w - Q_l))                                                      P22
    L   = mean over the pairs of the step

The prompt of a stored pair is the state: the question and the shared steps. Preferences.values names the columns of the
data with both steps' Q, from a tree search; a pair whose better step does not have the higher value is left out.
Without values, Step-DPO is DPO on such pairs.

Source: CPL, Wang et al. 2409.08642, where siblings share the value of their state, so that differences of Q equal
differences of advantages; Step-DPO 2406.18629.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common
from jrl.algos.contract import Facts, Needs, Objective, Sequences, other_of_pair
from jrl.algos.paired import pair_metrics, pairs_of, positive
from jrl.ops import pair_losses, reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class StepAPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1
    scale: float = 0.5  # log-odds that a step must win by for a difference of 1 in value


def check(config: StepAPO, facts: Facts) -> None:
    positive("StepAPO.beta", config.beta, 0.1)
    common.check_positive(
        config, {"scale": "it is what a step's value counts for; without values use DPO. 0.5 is usual."}
    )


def sequence_loss(config: StepAPO, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P22 on the better step of each pair, [..., S], and metrics."""
    pair = pairs_of(sequences)
    value = reduce.masked(sequences.value, sequences.mask)
    value, other = (jnp.where(pair.mask, x, 0) for x in (value, other_of_pair(value, sequences)))
    loss = pair_losses.step_apo(config.beta * pair.margin, value, other, config.scale)
    return reduce.masked(loss, pair.mask), pair_metrics(pair)


OBJECTIVE = Objective(
    config=StepAPO,
    check=check,
    needs=lambda config: Needs(reference=True, row_values=True),
    sequence_loss=sequence_loss,
    unit_size=2,
)
