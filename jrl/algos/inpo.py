"""INPO: no regret against itself, so that the policy comes to the Nash equilibrium of its judge.

    pair of a group as in OnlineDPO                                                                       F15
    h   = M - (tau / eta) M_ref - (1 - tau / eta) M_t, M = LP_w - LP_l                                    P19
    l_u = (h - (2 p - 1) / (2 eta))^2, p = 1                                                              P19
    L   = mean over the pairs of the step

M_t is of the policy that drew the pair: by the sampler's log-probs, so that several updates of a batch
(Learner.epochs, Learner.minibatches) or Online.lag move away from it. The reference is the policy as the stage found
it. eta is the step of mirror descent, tau the tie to the reference.

`INPO.preference = 'pair_model'` with `pairing = 'tournament'` is the paper's: the best and the worst of 8 by a
tournament of a preference model, where the best one beats the other. p is then how strongly it does, the mean over the
labels that the paper draws. A score ranks them without one.

Source: Zhang et al. 2407.00617 eq. 8.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, sampled_pairs
from jrl.algos.contract import Facts, Sequences, other_of_pair
from jrl.algos.online_ipo import certainty
from jrl.algos.paired import pair_metrics, pairs_of
from jrl.algos.sampled_pairs import Pairing
from jrl.ops import pair_losses, reduce
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class INPO(Pairing):
    eta: float = 0.1  # the margin that a preference is worth is 1 / (2 eta)
    tau: float = 0.02  # at most eta: at eta this is IPO against the reference, near 0 against the last policy alone


def check(config: INPO, facts: Facts) -> None:
    sampled_pairs.check_pairing(config, facts)
    common.check_positive(config, {"eta": "the margin is drawn to 1 / (2 eta). 0.1 is usual."})
    if not 0 <= config.tau <= config.eta:
        raise ValueError(
            f"INPO.tau = {config.tau} must be from 0 to INPO.eta = {config.eta}: tau / eta is the reference's share of "
            "what the policy is compared with. A fifth of eta is usual."
        )
    if facts.truncated_sampling:
        raise ValueError(
            "INPO compares with the log-probs of the distribution that drew a pair, and top-k, top-p or min-p makes it "
            "another one than the policy's; switch them off"
        )


def sequence_loss(config: INPO, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P19 on the preferred sequence of each pair, [..., S], and metrics."""
    pair = pairs_of(sequences)

    def margin(logprob: Array) -> Array:
        logprob = reduce.masked(logprob, sequences.mask)
        return jnp.where(pair.mask, logprob - other_of_pair(logprob, sequences), 0)

    loss = pair_losses.inpo(
        pair.logprob - pair.other_logprob,
        margin(sequences.ref_logprob),
        margin(sequences.behaviour_logprob),
        # As of OnlineIPO: with both divided by 2 p - 1 the target is (2 p - 1) / (2 eta), and tau / eta as it was.
        config.eta / certainty(pair),
        config.tau / certainty(pair),
    )
    return reduce.masked(loss, pair.mask), pair_metrics(pair)


OBJECTIVE = sampled_pairs.sampled_pair_objective(INPO, sequence_loss, check, strengths=True)
