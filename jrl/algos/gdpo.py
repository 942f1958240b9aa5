"""GDPO: normalize every reward component in the group before summing them; PPO's clip; the mean over tokens.

    a_i = sum_k weights_k * (C_ik - mean_g(C_k)) / (std_g(C_k) + 1e-6)                       A12
    A_t = a_i, whitened over all sampled tokens of the step                                  A23
    l_t = max(-rho_t * A_t, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_t)                  L2 (L3)
    L   = mean over all tokens of the step                                                   G1

C_k is the reward of one verifier or reward model, before its weight in the reward. GRPO adds the rewards first, so that
a component with a large spread drowns one with a small spread. If a component has a weight of 0 or less in the reward
(a verifier that only watches, a penalty, the items of a judge's rubric), `weights` must say what it counts for here.

Source: GDPO as in verl.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups
from jrl.ops import advantages as advantage_ops
from jrl.ops import reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class GDPO(common.Clipped):
    weights: tuple[float, ...] | None = None  # of the components in the order of their names; None: 1 each


def check(config: GDPO, facts: Facts) -> None:
    common.check_clipped(config, facts)
    if config.weights is not None and not any(config.weights):
        raise ValueError(f"GDPO.weights = {config.weights} leaves no component to learn from; None: 1 each.")
    if config.weights is None and facts.not_rewarded:
        raise ValueError(
            "GDPO.weights = None learns from every component alike, and some have a weight of 0 or less in the reward: "
            f"{', '.join(facts.not_rewarded)}. Give GDPO.weights one number for each component, in the order of their "
            "names; 0 for one that only watches"
        )
    common.check_unshaped(config, facts, reads="the components of the reward")


def advantages(config: GDPO, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    names = sorted(groups.components or ())
    weights = (1.0,) * len(names) if config.weights is None else config.weights
    if not names or len(weights) != len(names):
        raise ValueError(
            f"GDPO.weights has {len(weights)} numbers and the reward {len(names)} components ({', '.join(names)}): "
            "give one for each, in this order, or None for 1 each."
        )
    components = jnp.stack([reduce.widen(groups.components[name]) for name in names])
    counts = contract.eligible(groups)
    row = advantage_ops.component_zscores(
        components, jnp.asarray(weights, components.dtype), groups.group, counts, num_groups=groups.num_groups
    )
    token_advantages = reduce.whiten(
        advantage_ops.spread(row, groups.action_mask), groups.action_mask & counts[:, None]
    )
    return token_advantages, state, common.count_groups(groups, reward)


OBJECTIVE = common.CLIPPED._replace(
    config=GDPO,
    check=check,
    advantages=advantages,
)
