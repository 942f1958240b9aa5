"""Online DPO: of each prompt's samples the best is preferred to the worst, and DPO learns from these pairs.

    pair of a group: the row of the highest reward against that of the lowest, more than `margin` apart     F15
    u   = LP(y) - LP_ref(y), summed over the answer's tokens; D = u_preferred - u_other                     P0
    l_u = -log sigmoid(beta * D)                                                                            P5
    L   = mean over the pairs of the step

The reference is the policy as the stage found it. Rows in no pair are not learned from.

Source: Guo et al. 2402.04792 (pairs from the policy itself); pairs of K samples: RLHF Workflow, 2405.07863.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, contract, dpo
from jrl.algos.contract import Facts, Groups, Needs, Objective, Pairs
from jrl.ops import pairs as pair_ops
from jrl.types import traced

Array = jax.Array


@traced
class OnlineDPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1
    margin: float = 0.0  # rewards of a pair differ by more than this


def check(config: OnlineDPO, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=True)
    if not config.beta > 0:
        raise ValueError(f"OnlineDPO.beta = {config.beta} must be above 0: at 0 the loss is constant. 0.1 is usual.")
    if not config.margin >= 0:
        raise ValueError(
            f"OnlineDPO.margin = {config.margin} must not be negative: pairs of equal rewards would count."
        )


def pairs(config: OnlineDPO, groups: Groups, reward: Array) -> Pairs:
    label, unit = pair_ops.best_against_worst(
        reward, groups.group, contract.eligible(groups), num_groups=groups.num_groups, margin=config.margin
    )
    return Pairs(label, unit, jnp.ones_like(label))


OBJECTIVE = Objective(
    config=OnlineDPO,
    check=check,
    corrects_staleness=lambda config: True,
    needs=lambda config: Needs(reference=True),
    pairs=pairs,
    sequence_loss=dpo.sequence_loss,
    unit_size=2,
)
