"""OSP: the policy learns from pairs of its own answers, each as far as its judge prefers one to the other.

    pair of a group as in OnlineDPO                                                                       F15
    p   = sigmoid((R_w - R_l) / temperature), or what the pair model says: the strength of the preference P29
    l_u = -p log sigmoid(beta D) - (1 - p) log sigmoid(-beta D)                                           P29
    L   = mean over the pairs of the step

A pair that the judge hardly tells apart pulls its margin to 0 and no further. `OSP.preference = 'pair_model'` asks a
judge of pairs; with `PairModel.role = 'policy'` that is the policy itself. The strengths of stored pairs:
ConservativeDPO with Preferences.strength.

Source: OSP 2405.14103, where the policy judges pairs itself; of scores the strength is Bradley and Terry's.
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
    found = sampled_pairs.pairs(config, groups, reward)
    paired = found.unit >= 0
    sign = jnp.where(found.label > 0.5, 1, -1)
    # The rows of a pair are the only ones of their group that have a unit.
    gap = group_ops.total(jnp.where(paired, sign * reward, 0), groups.group, paired, num_groups=groups.num_groups)
    gap = group_ops.to_rows(gap, groups.group)
    strength = jax.nn.sigmoid(gap / config.temperature)
    # Rounded to 0.5, it would say of neither that it is preferred, and the pair would not be learned from.
    strength = jnp.maximum(strength, 0.5 + jnp.finfo(strength.dtype).epsneg)
    return found._replace(label=jnp.where(paired, jnp.where(sign > 0, strength, 1 - strength), 0))


def loss(config: OSP, pair: Pair) -> Array:
    """Returns P29 of every pair, [..., S]."""
    return pair_losses.soft_preference(config.beta * pair.margin, pair.preference)


OBJECTIVE = sampled_pairs.sampled_pair_objective(OSP, pair_loss(loss), check)._replace(pairs=pairs, strengths=True)
