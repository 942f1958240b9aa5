"""T-REG: DPO regularized by token rewards, from the reference's contrast of a good-answer and a bad-answer prompt.

    r_t = sigmoid(lp_ref(y_t | prompt for a good answer) - lp_ref(y_t | prompt for a bad answer)) - 1/2        P25
    REG(y) = -sum_t beta r_t lp_t,  lp_t with the gradient                                                      P25
    l_u = -log sigmoid(beta D) + alpha sg(sigmoid(-beta D)) (REG(y_w) + REG(y_l))                            P5, P25
    L   = mean over the pairs of the step

A pair comes with copies of both answers after both prompts, which are not trained on; an answer whose copy does not fit
has r_t = 0. The regularizer fades as the margin of the pair grows.

Source: T-REG, Zhou et al. 2412.02685.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts, Needs, Objective, Sequences, other_of_pair
from jrl.algos.paired import of_pairs, pair_metrics, pairs_of, positive
from jrl.ops import reduce
from jrl.ops.token_regularization import token_regularized
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class TREG:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1
    alpha: float = 0.25  # of the regularizer; the paper tries 0.1, 0.25 and 0.5


def check(config: TREG, facts: Facts) -> None:
    positive("TREG.beta", config.beta, 0.1)
    positive("TREG.alpha", config.alpha, 0.25)


def sequence_loss(config: TREG, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P25 on the preferred sequence of each pair, [..., S]; and metrics."""
    answers = sequences.replace(mask=sequences.mask & (sequences.label >= 0))
    pair = pairs_of(answers)
    regularizer = -config.beta * reduce.masked(sequences.contrast, answers.mask)
    other = other_of_pair(regularizer, answers)
    loss = token_regularized(config.beta * pair.margin, regularizer, other, alpha=config.alpha)
    metrics = of_pairs({"t_reg/regularizer": regularizer + other}, pair)
    return reduce.masked(loss, pair.mask), {**pair_metrics(pair), **metrics}


OBJECTIVE = Objective(
    config=TREG,
    check=check,
    needs=lambda config: Needs(reference=True, contrast=True),
    sequence_loss=sequence_loss,
    unit_size=6,
)
