"""OSP: online DPO with soft labels, the strengths of a judge's preferences between the policy's own answers.

    pair of a group as in OnlineDPO                                                                       F15
    p   = sigmoid((R_w - R_l) / temperature), or the pair model's: the strength of the preference         P29
    l_u = -p log sigmoid(beta D) - (1 - p) log sigmoid(-beta D)                                           P29
    L   = mean over the pairs of the step

A pair that the judge can hardly tell apart has a target margin near 0. `OSP.preference = 'pair_model'` uses a judge of
pairs; with `PairModel.role = 'policy'` that is the policy itself. For stored pairs with strengths use ConservativeDPO
with Preferences.strength.

Source: OSP 2405.14103, where the policy judges pairs itself; the strength from scores is Bradley-Terry's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, sampled_pairs
from jrl.algos.contract import Facts, Groups, Pairs
from jrl.algos.paired import Pair, pair_loss, positive
from jrl.algos.sampled_pairs import Pairing
from jrl.ops import groups as group_ops
from jrl.ops import pair_losses
from jrl.types import traced

Array = jax.Array


@traced
class OSP(Pairing):
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1
    temperature: float = 1.0  # of the judge: rewards apart by so much are log-odds of 1. Of a pair model: not read


def check(config: OSP, facts: Facts) -> None:
    sampled_pairs.check_pairing(config, facts)
    positive("OSP.beta", config.beta, 0.1)
    common.check_positive(config, {"temperature": "it divides a difference of rewards. 1.0 is usual."})


def pairs(config: OSP, groups: Groups, reward: Array) -> Pairs:
    """Returns F15's pairs with P29's strengths as labels."""
    if config.preference == "pair_model":
        return sampled_pairs.strong_pairs(config, groups, reward)
    hard_pairs = sampled_pairs.pairs(config, groups, reward)
    paired = hard_pairs.unit >= 0
    sign = jnp.where(hard_pairs.label > 0.5, 1, -1)
    # A group has at most one pair, so a sum over the group is one over the pair.
    gap = group_ops.total(jnp.where(paired, sign * reward, 0), groups.group, paired, num_groups=groups.num_groups)
    gap = group_ops.to_rows(gap, groups.group)
    strength = jax.nn.sigmoid(gap / config.temperature)
    # At exactly 0.5, after rounding, neither row would be preferred and the pair would be dropped.
    strength = jnp.maximum(strength, 0.5 + jnp.finfo(strength.dtype).epsneg)
    return hard_pairs._replace(label=jnp.where(paired, jnp.where(sign > 0, strength, 1 - strength), 0))


def loss(config: OSP, pair: Pair) -> Array:
    """Returns P29 of every pair, [..., S]."""
    return pair_losses.soft_preference(config.beta * pair.margin, pair.preference)


OBJECTIVE = sampled_pairs.sampled_pair_objective(OSP, pair_loss(loss), check)._replace(pairs=pairs, strengths=True)
