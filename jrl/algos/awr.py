"""AWR: imitate the policy's samples with weights that grow exponentially with their advantage.

    A_i = (R_i - mean_g) / (std_g + 1e-6)                                                    A3
    a_i = min(exp(A_i / beta), max_weight); l_t = -a_i * logprobs_t                           L16
    L   = mean over all tokens of the step                                                   G1

There is no ratio and no clip: any policy may have drawn the samples. An advantage of 0 has weight 1, so groups of equal
rewards would be imitated; `drop_equal_groups` (on by default) leaves them out.

Source: Peng et al. 1910.00177, whose advantages come from a value function; beta 1, weights up to 20.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, contract, grpo, raft
from jrl.algos.contract import Facts, Groups, Objective
from jrl.ops import awr, filters
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class AWR:
    beta: float = 1.0  # temperature of the weights, in deviations of a group's rewards
    max_weight: float = 20.0  # largest weight
    drop_equal_groups: bool = True  # leave out groups whose rewards are all equal
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus


def check(config: AWR, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=True)
    common.check_entropy(config)
    common.check_positive(config, {"beta": "weights are exp(A / beta). 1.0 is usual."})
    common.check_largest_weight(config)


def keep(config: AWR, groups: Groups) -> Array:
    rows = contract.eligible(groups)
    if not config.drop_equal_groups:
        return rows
    return rows & filters.has_signal(groups.reward, groups.group, rows, num_groups=groups.num_groups)


def advantages(config: AWR, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    token_advantages, state, counters = grpo.advantages(config, groups, reward, state)
    mask = groups.action_mask & contract.eligible(groups)[:, None]
    weights = awr.awr_weights(token_advantages, beta=config.beta, max_weight=config.max_weight)
    return jnp.where(mask, weights, 0), state, counters


OBJECTIVE = Objective(
    config=AWR,
    check=check,
    keep=keep,
    needs=common.entropy_needs,
    advantages=advantages,
    token_loss=raft.token_loss,
    corrects_staleness=lambda config: True,
)
