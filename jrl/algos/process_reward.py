"""Process reward model: the probability that a solution is right up to the end of a step.

    s   = the reward head at the end of a step, p = sigmoid(s); y its label, 1: right, 0: wrong, or a share in between
    l   = -(y log p + (1 - y) log(1 - p))                                                                  P4
    L   = mean over the steps of the batch

StepLabels returns one step of a solution per visit, with everything before it. TRL's PRM trainer reads all steps of a
solution in one pass; if all solutions have the same number of steps, its mean over tokens is this one over many visits.

Source: Lightman et al. 2305.20050; labels from completions: Wang et al. 2312.08935.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos.contract import Needs, Objective, Sequences
from jrl.ops import reduce
from jrl.ops.reward_regression import step_cross_entropy
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class ProcessReward:
    """A reward model of steps, trained by cross-entropy. It has no options."""


def sequence_loss(config: ProcessReward, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P4 at the end of every step, 0 elsewhere, [..., S] float32; and its metrics."""
    mask = sequences.mask & (sequences.length > 0)
    score, label = reduce.masked(sequences.score, mask), reduce.masked(sequences.label, mask)
    loss = reduce.masked(step_cross_entropy(score, label), mask)
    right = jnp.where(score == 0, 0.5, (score > 0) == (label > 0.5))
    metrics = {"reward_model/accuracy": right, "reward_model/probability": jax.nn.sigmoid(score)}
    return loss, {
        name: jax.lax.stop_gradient(reduce.masked(value, mask)).astype(jnp.float32) for name, value in metrics.items()
    }


OBJECTIVE = Objective(
    config=ProcessReward,
    needs=lambda config: Needs(logprobs=False, score=True),
    sequence_loss=sequence_loss,
)
