"""Online VPO: online DPO with optimism, an exploration bonus that pushes away from the reference's answers.

    pair of an answer y of the policy and an answer y' of the reference, the better one preferred, as in XPO   P20
    l_u = -log sigmoid(beta D) + weight * beta * u(y'), u = LP - LP_ref                                   P5, P21
    L   = mean over the pairs of the step

The reference is the calibration distribution, and y' its sample, drawn by `Online.strategy = @ReferenceSamples()`.
LP_ref(y') has no gradient, so the gradient equals that of XPO with alpha = weight * beta. For stored pairs, with the
sign of pessimism, use VPO.

Source: Cen et al. 2405.19320; sign and form as its abstract states them.
"""

from __future__ import annotations

import jax

from jrl.algos import common, xpo
from jrl.algos.contract import Facts, Sequences, other_of_pair
from jrl.algos.paired import gains, pair_metrics, pairs_of, positive
from jrl.ops import pair_losses, reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class OnlineVPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1
    weight: float = 0.01  # alpha of the paper, above 0; it should fall


def check(config: OnlineVPO, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=True)
    positive("OnlineVPO.beta", config.beta, 0.1)
    positive("OnlineVPO.weight", config.weight, 0.01)


def sequence_loss(config: OnlineVPO, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P5 and P21's optimistic term on the preferred sequence of each pair, [..., S], and metrics."""
    pair = pairs_of(sequences)
    reference_gain = reduce.masked(sequences.value * gains(sequences), sequences.mask)
    calibration = reference_gain + other_of_pair(reference_gain, sequences)
    loss = pair_losses.vpo(config.beta * pair.margin, config.beta * calibration, config.weight)
    return reduce.masked(loss, pair.mask), pair_metrics(pair)


OBJECTIVE = xpo.OBJECTIVE._replace(config=OnlineVPO, check=check, sequence_loss=sequence_loss)
