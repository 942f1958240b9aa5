"""CRPG, from CGPO: REINFORCE on a reward that is 0 unless the judges are satisfied, and that shrinks with the distance
from the reference.

    Rc_i = sigmoid(reward_i - reward of the prompt's greedy answer) where the row is feasible, else 0     R13
    R_i = max(1 - d_i / kl_limit, 0) * Rc_i,  d_i the sum of the row's log-ratios to the reference        R13
    A_i = R_i - mean over the trained rows                                                               A2
    l_t = -A_i * logprobs_t                                                                              L1
    L   = mean over all tokens of the step                                                               G1

The first sample of every prompt is the policy's greedy answer: it is the baseline and is not trained on. A prompt whose
greedy answer has no valid verdict is left out. `Shaping.constraints` define which rows are feasible; set their
infeasible_reward to None, since the objective gates the calibrated reward itself. Without constraints all rows are
feasible. The reference is the initial policy of the stage.

Source: CGPO, 2409.20370 section 4.2, whose baseline answer is one of a fixed set.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups, Needs, Objective
from jrl.algos.reinforce import check_one_update, token_loss
from jrl.ops import advantages as advantage_ops
from jrl.ops import constraints, reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class CRPG:
    kl_limit: float = 10.0  # nats of a whole completion, at which nothing is left of its reward
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus
    importance: common.TruncatedImportance | None = None  # correction for stale or mismatched samplers; None: none


def check(config: CRPG, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=True)
    check_feasible(config, facts)
    common.check_importance(config)
    common.check_entropy(config)
    common.check_positive(config, {"kl_limit": "it is what a completion's log-ratio is divided by. 10.0 is usual."})
    check_one_update(config, facts)


def check_feasible(config: Any, facts: Facts) -> None:
    """Raises ValueError if constraints replace the reward of infeasible rows, which the objective compares."""
    if facts.replaces_infeasible:
        raise ValueError(
            f"{type(config).__name__} reads which rows fail Shaping.constraints, and their reward as it was scored; "
            "set Constraints.infeasible_reward = None"
        )


def feasible(groups: Groups) -> Array:
    """Returns the rows that satisfy every constraint, [N] bool."""
    return jnp.ones_like(groups.valid) if groups.feasible is None else groups.feasible


def calibrated(groups: Groups, reward: Array) -> tuple[Array, Array]:
    """Returns Rc of every trained or baseline row, [N] float32 in (0, 1); and the trained rows, [N] bool: scored
    samples, not greedy, whose prompt's greedy answer was scored too."""
    rows, greedy = contract.eligible(groups), contract.greedy(groups)
    scored = jnp.where(rows, reward, 0)
    baseline, has_baseline = constraints.baseline_score(
        scored, rows & greedy, groups.group, num_groups=groups.num_groups
    )
    return constraints.calibrated_reward(scored, baseline), rows & ~greedy & has_baseline


def advantages(config: CRPG, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    score, counts = calibrated(groups, reward)
    bounded = constraints.kl_bounded_reward(
        constraints.constrained_reward(score, feasible(groups), infeasible_reward=0.0),
        groups.old_logprobs,
        groups.ref_logprobs,
        groups.action_mask & counts[:, None],
        limit=config.kl_limit,
    )
    # A NaN baseline becomes the batch's own mean.
    row, _ = advantage_ops.moving_baseline(bounded, counts, jnp.full((), jnp.nan), decay=0.0)
    counters = common.count_groups(groups, reward) | {
        "bounded_reward": reduce.masked_mean(bounded, counts),
        "infeasible": jnp.sum(counts & ~feasible(groups)),
    }
    return advantage_ops.spread(row, groups.action_mask), state, counters


OBJECTIVE = Objective(
    config=CRPG,
    check=check,
    corrects_staleness=common.has_importance,
    advantages=advantages,
    token_loss=token_loss,
    keep=lambda config, groups: calibrated(groups, groups.reward)[1],
    needs=lambda config: Needs(
        reference=True,
        credit_logprobs=True,
        greedy_sample=True,
        entropy_gradient=config.entropy_bonus is not None,
    ),
)
