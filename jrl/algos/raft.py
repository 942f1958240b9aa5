"""RAFT: imitate the best answer of each prompt.

    a_i = 1 on the best row of a group, 0 elsewhere                                          L14
    l_t = -a_i * logprobs_t
    L   = mean over the tokens of the rows with a_i > 0                                      G1

At ties the first sample is taken. A group whose rewards are all equal has no best row and is left out. Use many samples
per prompt, 8 to 32. It learns from successes only, so the entropy falls fast.

Source: Dong et al. 2304.06767. For a threshold instead of the best use ExpertIteration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups, Objective, Tokens
from jrl.ops import advantages as advantage_ops
from jrl.ops import rejection_sampling, surrogate
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class RAFT:
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus


def check(config: RAFT, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=True)
    common.check_entropy(config)


def row_weights(config: RAFT, groups: Groups, reward: Array) -> Array:
    rows = contract.eligible(groups)
    return rejection_sampling.best_of_group(reward, groups.group, groups.sample, rows, num_groups=groups.num_groups)


def imitating(row_weights: Callable[[Any, Groups, Array], Array]) -> dict[str, Callable[..., Any]]:
    """Returns the functions of an objective that imitates every row with its weight, and leaves out rows of weight 0.

    Args:
      row_weights: (config, groups, reward) -> [N] float, not negative.
    """

    def advantages(config: Any, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
        row = row_weights(config, groups, reward)
        return advantage_ops.spread(row, groups.action_mask), state, common.count_groups(groups, reward)

    return {"keep": lambda config, groups: row_weights(config, groups, groups.reward) > 0, "advantages": advantages}


def token_loss(config: RAFT, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    loss = surrogate.policy_gradient(tokens.logprobs, tokens.advantages, tokens.mask)
    return common.unweighted_loss(config, loss, tokens)


OBJECTIVE = Objective(
    config=RAFT,
    check=check,
    corrects_staleness=lambda config: True,
    needs=common.entropy_needs,
    token_loss=token_loss,
    **imitating(row_weights),
)
