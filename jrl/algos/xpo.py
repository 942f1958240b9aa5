"""XPO: online DPO that explores, by a push away from what the reference would say.

    pair of an answer y of the policy and an answer y' of the reference, the better one preferred         P20
    l_u = -log sigmoid(beta D) + alpha * LP(y')                                                      P5, P20
    L   = mean over the pairs of the step

`Online.strategy = @ReferenceSamples()` draws the reference's half of a prompt's samples; the k-th of each half are a
pair. A pair of equal rewards is left out, its bonus too. To minimize alpha * LP(y') takes mass off the reference: that
is the exploration, so that alpha is small and should fall. The reference is the policy as the stage found it.

Source: Xie et al. 2405.21046 algorithm 1, where alpha falls with the iterations; TRL has the same form.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups, Needs, Objective, Pairs, Sequences, other_of_pair
from jrl.algos.paired import pair_metrics, pairs_of, positive
from jrl.ops import groups as group_ops
from jrl.ops import pair_losses, reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class XPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1
    alpha: float = 1e-5  # weight of the bonus, per nat of the reference's answer


def check(config: XPO, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=True)
    positive("XPO.beta", config.beta, 0.1)
    positive("XPO.alpha", config.alpha, 1e-5)


def pairs(config: XPO, groups: Groups, reward: Array) -> Pairs:
    """Returns P20's pairs, of the k-th samples of both halves; `value` is 1 on the reference's answers."""
    half = groups.group.shape[0] // groups.num_groups // 2
    theirs = groups.sample >= half
    counts = contract.eligible(groups)
    unit = groups.group * half + groups.sample % half
    of = dict(num_groups=groups.num_groups * half)
    own, other = counts & ~theirs, counts & theirs
    reward_of = lambda rows: group_ops.total(jnp.where(rows, reward, 0), unit, rows, **of)
    there = lambda rows: group_ops.count(unit, rows, **of) > 0
    gap = reward_of(own) - reward_of(other)
    apart = group_ops.to_rows(there(own) & there(other) & (gap != 0), unit) & counts
    own_wins = group_ops.to_rows(gap > 0, unit)
    label = (apart & (own_wins != theirs)).astype(jnp.float32)
    return Pairs(label, jnp.where(apart, unit, -1), jnp.ones_like(label), theirs.astype(jnp.float32))


def sequence_loss(config: XPO, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P5 and P20's bonus on the preferred sequence of each pair, [..., S], and metrics."""
    pair = pairs_of(sequences)
    theirs = reduce.masked(sequences.value * reduce.masked(sequences.logprob, sequences.mask), sequences.mask)
    bonus = theirs + other_of_pair(theirs, sequences)
    loss = pair_losses.xpo(config.beta * pair.margin, bonus, config.alpha)
    return reduce.masked(loss, pair.mask), pair_metrics(pair)


OBJECTIVE = Objective(
    config=XPO,
    check=check,
    corrects_staleness=lambda config: True,
    needs=lambda config: Needs(reference=True),
    pairs=pairs,
    sequence_loss=sequence_loss,
    unit_size=2,
)
