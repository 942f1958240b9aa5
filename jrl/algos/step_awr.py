"""StepAWR: imitate the steps of stored solutions, right and wrong ones, weighted by each step's advantage.

    A_k = Q(prefix after step k) - Q(prefix before it), 0 where |A_k| < 1 / rollouts         A17
    l   = -min(exp(A_k / beta), max_weight) * LP_k, LP_k the sum over the tokens of step k    L16
    L   = mean over the steps of the batch                                                   G3

Q is the success rate of `rollouts` completions of a prefix. StepValues returns one step of a solution per visit, after
the steps before it. The good steps of a wrong solution are imitated too.

Source: Setlur et al. 2406.14532, who use pairs of steps with the sign of A (as StepAPO does); weights as in Peng et al.
1910.00177.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common
from jrl.algos.contract import Facts, Needs, Objective, Sequences
from jrl.algos.stored_advantages import advantage_metrics, learned_rows, numbers
from jrl.ops import awr, tree
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class StepAWR:
    rollouts: int = 4  # completions of a prefix that a success rate is the mean of
    beta: float = 0.25  # temperature of the weights, in success rates; L16 has 1, of normalized advantages
    max_weight: float = 20.0  # largest weight


def check(config: StepAWR, facts: Facts) -> None:
    common.check_positive(
        config,
        {
            "rollouts": "a success rate is the mean of so many completions. 4 to 16 are usual.",
            "beta": "weights are exp(A / beta), A a difference of success rates. 0.25 is usual.",
        },
    )
    common.check_largest_weight(config)


def sequence_loss(config: StepAWR, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns L16 on every step with a token, 0 elsewhere, [..., S]; and metrics."""
    mask = learned_rows(sequences)
    success, estimated = jnp.stack(numbers(sequences), axis=-1), jnp.stack([mask, mask], axis=-1)
    advantage = tree.step_advantages(success, estimated, rollouts=config.rollouts)[..., 0]
    loss = awr.awr(sequences.logprob, advantage, mask, beta=config.beta, max_weight=config.max_weight)
    weight = awr.awr_weights(advantage, beta=config.beta, max_weight=config.max_weight)
    return loss, advantage_metrics(sequences, advantage, weight)


OBJECTIVE = Objective(
    config=StepAWR,
    check=check,
    needs=lambda config: Needs(
        row_values=True, row_value_names=("the success rate before the step", "the success rate after it")
    ),
    sequence_loss=sequence_loss,
)
