"""Rationale-augmented DPO: DPO, plus learning to explain why the preferred answer is better.

    l_u = -log sigmoid(beta D)                                                        of every pair u       P5
        + weight * mean over the tokens of its rationale of -log pi(token | x, y_w, y_l, those before)      P35
    L   = mean over the pairs of the step

A pair without a rationale has only the first term. The answers' tokens are not in the second term.

Source: Just et al. 2407.14477 eq. 6, for DPO. The form of the weight is from memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos.contract import Facts, Needs, Objective, Sequences
from jrl.algos.paired import pair_metrics, pairs_of, positive
from jrl.ops import reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class RationaleDPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1
    weight: float = 1.0  # of the rationale's NLL, a mean over its tokens


def check(config: RationaleDPO, facts: Facts) -> None:
    positive("RationaleDPO.beta", config.beta, 0.1)
    positive("RationaleDPO.weight", config.weight, 1.0)


def sequence_loss(config: RationaleDPO, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P5 on the preferred sequence of each pair and P35's NLL on its rationale, [..., S]; and metrics."""
    rationale = sequences.mask & (sequences.label == -1) & (sequences.length > 0)
    pair = pairs_of(sequences.replace(mask=sequences.mask & (sequences.label >= 0)))
    nll = -reduce.masked(sequences.logprob, rationale) / jnp.where(rationale, sequences.length, 1)
    loss = reduce.masked(jax.nn.softplus(-config.beta * pair.margin), pair.mask) + config.weight * nll
    surprise = jax.lax.stop_gradient(nll).astype(jnp.float32)
    # Both are means over all pairs of a step: their quotient is the mean over the pairs that have a rationale.
    share = rationale.astype(jnp.float32)
    return loss, {**pair_metrics(pair), "pairs/rationale_nll": surprise, "pairs/rationale_share": share}


OBJECTIVE = Objective(
    config=RationaleDPO,
    check=check,
    needs=lambda config: Needs(reference=True),
    sequence_loss=sequence_loss,
    unit_size=3,
)
