"""CODPO, from CGPO: online DPO on pairs of an answer that satisfies the judges and one that does not.

    pair of a group: the feasible row with the highest reward against the infeasible row with the lowest; if all are
    feasible, against the lowest; without a feasible row there is no pair                                  R13
    l_u = -log sigmoid(beta * D) - weight * LPbar_w, D as in DPO                                           P5, P30
    L   = mean over the pairs of the step

`Shaping.constraints` define which rows are feasible; their `infeasible_reward` must be None, since the original reward
ranks the infeasible rows. Without constraints all rows are feasible.

Source: CGPO, Xu et al. 2409.20370 section 4.2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, contract, rpo
from jrl.algos.contract import Facts, Groups, Needs, Objective, Pairs
from jrl.algos.crpg import check_feasible, feasible
from jrl.algos.paired import pair_loss, positive
from jrl.ops import pairs as pair_ops
from jrl.types import traced

Array = jax.Array


@traced
class CODPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1
    weight: float = 1.0  # of the preferred answer's NLL, a mean over its tokens


def check(config: CODPO, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=True)
    check_feasible(config, facts)
    positive("CODPO.beta", config.beta, 0.1)
    positive("CODPO.weight", config.weight, 1.0)


def pairs(config: CODPO, groups: Groups, reward: Array) -> Pairs:
    label, unit = pair_ops.feasible_against_infeasible(
        reward, groups.group, contract.eligible(groups), feasible(groups), num_groups=groups.num_groups
    )
    return Pairs(label, unit, jnp.ones_like(label))


OBJECTIVE = Objective(
    config=CODPO,
    check=check,
    corrects_staleness=lambda config: True,
    needs=lambda config: Needs(reference=True),
    pairs=pairs,
    sequence_loss=pair_loss(rpo.loss),
    unit_size=2,
)
