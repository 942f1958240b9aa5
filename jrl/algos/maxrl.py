"""MaxRL: rewards relative to the mean of their group, so that the rarest right answers count most.

    A_i = (R_i - mean_g) / mean_g, 0 where mean_g is not above 0                              A11
    l_t = max(-rho_t * A_i, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_i)                  L2 (L3)
    L   = mean over all tokens of the step                                                   G1

With rewards 0 and 1 and infinitely many samples this is the gradient of log(probability of a right answer), that is,
maximum likelihood of being right; the plain mean maximizes the probability itself. Rewards must not be negative. A
single right answer among n has advantage n - 1: clip gradients.

Source: prime-rl's MaxRL.
"""

from __future__ import annotations

import jax

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups
from jrl.ops import advantages as advantage_ops
from jrl.ops import best_of_k
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class MaxRL(common.Clipped):
    pass


def check(config: MaxRL, facts: Facts) -> None:
    common.check_clipped(config, facts)
    if facts.negative_rewards:
        raise ValueError(
            "MaxRL divides by the mean reward of a prompt's samples. With negative rewards it may be near 0, and "
            f"advantages of any size; {', '.join(facts.negative_rewards)} can make a reward negative. Leave it out, or "
            "use GRPO"
        )


def advantages(config: MaxRL, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    row = best_of_k.relative_to_mean(reward, groups.group, contract.eligible(groups), num_groups=groups.num_groups)
    return advantage_ops.spread(row, groups.action_mask), state, common.count_groups(groups, reward)


OBJECTIVE = common.CLIPPED._replace(config=MaxRL, check=check, advantages=advantages)
