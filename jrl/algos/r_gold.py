"""R-GOLD: imitate stored answers with a reward above expectation, with more weight on their likely tokens.

    a_i = max(R_i - V(x), 0)                                                                 A19
    l_i = -a_i * sum_t max(p_t, floor) * lp_t, with no gradient through the weight           L15
    L   = mean over the answers of the step                                                   G3

p_t is the token's probability under the current policy; ALoL uses the ratio to the reference instead. R and V(x) are
columns of the data: `Rated.values = ('reward', 'expected')`, as in ALoL.

Source: Baheti et al. 2305.14718, floor 0.1, who combine their advantage with GOLD, Pang and He 2009.07839. There rows
are drawn in proportion to a_i: `RGOLD.draw = 'proportional'`. By default (`'in_turn'`) every row
comes once per epoch.
"""

from __future__ import annotations

from typing import Literal

import jax

from jrl.algos.contract import Facts, Needs, Objective, Sequences
from jrl.algos.stored_advantages import (
    EXPECTATION,
    advantage_metrics,
    check_draw,
    check_some_better,
    draw,
    learned_rows,
    numbers,
)
from jrl.ops import reduce
from jrl.ops.stored_advantages import better_than_expected
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class RGOLD:
    floor: float = 0.1  # least weight of a token, whose own is its probability
    # proportional: rows are drawn with replacement, each as likely as it earned more than was expected, in its share of
    # all; in_turn: every row once before any comes again
    draw: Literal["in_turn", "proportional"] = "in_turn"


def check(config: RGOLD, facts: Facts) -> None:
    check_draw(config)
    if not 0 < config.floor <= 1:
        raise ValueError(
            f"RGOLD.floor = {config.floor} must be in (0, 1]: the least weight of a token, which is its probability "
            "elsewhere. 0.1 is usual; at 1 every token weighs 1."
        )


def sequence_loss(config: RGOLD, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns L15 on every answer with a token, 0 elsewhere, [..., S]; and metrics."""
    mask = learned_rows(sequences)
    reward, expected = numbers(sequences)
    weight = better_than_expected(reward, expected, mask)
    loss = -weight * reduce.masked(sequences.floored_logprob, mask)
    return loss, advantage_metrics(sequences, reward - expected, weight)


OBJECTIVE = Objective(
    config=RGOLD,
    check=check,
    needs=lambda config: Needs(row_values=True, row_value_names=EXPECTATION, probability_floor=config.floor),
    sequence_loss=sequence_loss,
    check_stored=check_some_better,
    draw=draw,
)
