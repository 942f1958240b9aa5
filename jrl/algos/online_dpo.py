"""Online DPO: of each prompt's samples the best is preferred to the worst, and DPO learns from these pairs.

    pair of a group: the row of the highest reward against that of the lowest (or the second highest, or
    any other), more than `margin` apart                                                                    F15
    u   = LP(y) - LP_ref(y), summed over the answer's tokens; D = u_preferred - u_other                     P0
    l_u = -log sigmoid(beta * D)                                                                            P5
    L   = mean over the pairs of the step

The reference is the policy as the stage found it. Rows in no pair are not learned from.

Source: Guo et al. 2402.04792 (pairs from the policy itself); pairs of K samples: RLHF Workflow, 2405.07863.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jrl.algos import common, contract, dpo
from jrl.algos.contract import Facts, Groups, Needs, Objective, Pairs
from jrl.algos.paired import positive
from jrl.ops import pairs as pair_ops
from jrl.types import traced

Array = jax.Array


@traced
class OnlineDPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1
    margin: float = 0.0  # rewards of a pair differ by more than this
    length_penalty: float | None = None  # subtracted from the reward for each token where pairs are made; None: nothing
    # Which row the best one of a group is preferred to: the lowest, any other, or the second highest.
    pairing: Literal["best_worst", "best_random", "best_two"] = "best_worst"


def check(config: OnlineDPO, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=True)
    positive("OnlineDPO.beta", config.beta, 0.1)
    if not config.margin >= 0:
        raise ValueError(
            f"OnlineDPO.margin = {config.margin} must not be negative: pairs of equal rewards would count."
        )
    if config.length_penalty is not None and not config.length_penalty > 0:
        raise ValueError(f"OnlineDPO.length_penalty = {config.length_penalty} must be above 0, or None for no penalty.")
    if config.pairing not in ("best_worst", "best_random", "best_two"):
        raise ValueError(f"OnlineDPO.pairing = {config.pairing!r} must be 'best_worst', 'best_random' or 'best_two'.")


def shape(config: OnlineDPO, groups: Groups) -> Array:
    if config.length_penalty is None:
        return groups.reward
    return groups.reward - config.length_penalty * jnp.sum(groups.action_mask, axis=-1)


def pairs(config: OnlineDPO, groups: Groups, reward: Array) -> Pairs:
    arrays = reward, groups.group, contract.eligible(groups)
    options = {"num_groups": groups.num_groups, "margin": config.margin}
    if config.pairing == "best_worst":
        label, unit = pair_ops.best_against_worst(*arrays, **options)
    elif config.pairing == "best_two":
        label, unit = pair_ops.best_two(*arrays, **options)
    else:
        label, unit = pair_ops.best_against_random(*arrays, common.row_draws(groups), **options)
    return Pairs(label, unit, jnp.ones_like(label))


OBJECTIVE = Objective(
    config=OnlineDPO,
    check=check,
    corrects_staleness=lambda config: True,
    needs=lambda config: Needs(reference=True),
    shape=shape,
    pairs=pairs,
    sequence_loss=dpo.sequence_loss,
    unit_size=2,
)
