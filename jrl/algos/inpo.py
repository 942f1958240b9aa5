"""INPO: no-regret learning in self-play, which converges to the Nash equilibrium of the judge's preferences.

    pair of a group as in OnlineDPO                                                                       F15
    h   = M - (tau / eta) M_ref - (1 - tau / eta) M_t, M = LP_w - LP_l                                    P19
    l_u = (h - (2 p - 1) / (2 eta))^2, p = 1                                                              P19
    L   = mean over the pairs of the step

M_t is under the policy that drew the pair, from the sampler's log-probs; with several updates per batch
(Learner.epochs, Learner.minibatches) or Online.lag the current policy differs from it. The reference is the initial
policy of the stage. eta is the step size of mirror descent, tau the weight of the KL to the reference.

`INPO.preference = 'pair_model'` with `pairing = 'tournament'` is the paper's setup: the best and the worst of 8 by a
tournament of a preference model, if the best beats the worst. p is then the strength of that preference, the mean of
the labels that the paper draws. Without a pair model, rewards rank the samples.

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
        # As in OnlineIPO: with both divided by 2 p - 1 the target is (2 p - 1) / (2 eta) and tau / eta is unchanged.
        config.eta / certainty(pair),
        config.tau / certainty(pair),
    )
    return reduce.masked(loss, pair.mask), pair_metrics(pair)


OBJECTIVE = sampled_pairs.sampled_pair_objective(INPO, sequence_loss, check, strengths=True)
