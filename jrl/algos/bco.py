"""BCO: a classifier of preferred and rejected answers with logit beta u - shift, where the shift tracks the mean.

    l_u   = -log sigmoid(beta u_w - shift) - log sigmoid(shift - beta u_l)                              P15
    shift = moving average of the mean of beta u over a step's pairs, in the train state; it starts at 0
    L     = mean over the pairs of the step

A step uses the shift from before it, so that the loss does not depend on micro-batches. TRL updates it within the step.

Source: Jung et al. 2404.04656.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos.contract import Facts, Needs, Objective, Sequences
from jrl.algos.paired import pair_metrics, pairs_of, positive
from jrl.ops import pair_losses, reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class BCO:
    beta: float = 0.1  # log-odds for a log-ratio of 1
    decay: float = 0.9  # share of the shift that a step keeps


def check(config: BCO, facts: Facts) -> None:
    positive("BCO.beta", config.beta, 0.1)
    if not 0 <= config.decay < 1:
        raise ValueError(f"BCO.decay = {config.decay} must be at least 0 and below 1; 0.9 is usual.")


def sequence_loss(config: BCO, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P15's BCO of every pair, [..., S], and metrics."""
    pair = pairs_of(sequences)
    loss = pair_losses.bco(pair.gain, pair.other_gain, config.beta, state["shift"])
    mean = jax.lax.stop_gradient(config.beta * (pair.gain + pair.other_gain) / 2).astype(jnp.float32)
    return reduce.masked(loss, pair.mask), pair_metrics(pair) | {"bco/mean": reduce.masked(mean, pair.mask)}


def next_state(config: BCO, state: PyTree, metrics: dict[str, Array]) -> PyTree:
    return {"shift": config.decay * state["shift"] + (1 - config.decay) * metrics["bco/mean"]}


OBJECTIVE = Objective(
    config=BCO,
    check=check,
    needs=lambda config: Needs(reference=True),
    init_state=lambda config: {"shift": jnp.zeros((), jnp.float32)},
    sequence_loss=sequence_loss,
    next_state=next_state,
    unit_size=2,
)
