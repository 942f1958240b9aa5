"""XPO: online DPO with an exploration bonus that pushes away from the reference's answers.

    pair of an answer y of the policy and an answer y' of the reference, the better one preferred         P20
    l_u = -log sigmoid(beta D) + alpha * LP(y')                                                      P5, P20
    L   = mean over the pairs of the step

`Online.strategy = @ReferenceSamples()` draws half of a prompt's samples from the reference; the k-th samples of both
halves are a pair. A pair of equal rewards is left out, and its bonus too. Minimizing alpha * LP(y') moves probability
away from the reference's answers; alpha is small and should decay. The reference is the initial policy of the stage.

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
    from_reference = groups.sample >= half
    counts = contract.eligible(groups)
    unit = groups.group * half + groups.sample % half
    num_units = groups.num_groups * half
    policy_rows, reference_rows = counts & ~from_reference, counts & from_reference
    reward_of = lambda rows: group_ops.total(jnp.where(rows, reward, 0), unit, rows, num_groups=num_units)
    present = lambda rows: group_ops.count(unit, rows, num_groups=num_units) > 0
    gap = reward_of(policy_rows) - reward_of(reference_rows)
    paired = group_ops.to_rows(present(policy_rows) & present(reference_rows) & (gap != 0), unit) & counts
    policy_wins = group_ops.to_rows(gap > 0, unit)
    label = (paired & (policy_wins != from_reference)).astype(jnp.float32)
    return Pairs(label, jnp.where(paired, unit, -1), jnp.ones_like(label), from_reference.astype(jnp.float32))


def sequence_loss(config: XPO, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P5 and P20's bonus on the preferred sequence of each pair, [..., S], and metrics."""
    pair = pairs_of(sequences)
    reference_logprob = reduce.masked(
        sequences.value * reduce.masked(sequences.logprob, sequences.mask), sequences.mask
    )
    bonus = reference_logprob + other_of_pair(reference_logprob, sequences)
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
