"""WPO: DPO that weights a pair by how likely the policy is to sample it, so that stored pairs are more on policy.

    a   = LPbar - mean over the answer's tokens of ln sum_v p_v^2: mean log-prob, less that of the expected prob
    l_u = min(1, exp(a_w + a_l)) * -log sigmoid(beta D), no gradient through the weight              P30, P5
    L   = mean over the pairs of the step

sum_v p_v^2 is the expected probability of a token drawn at that position. Without it the weights of an uncertain policy
would vanish ("sampled alignment").

Source: Zhou et al. 2406.11827 section 3.2, with means over tokens. TRL's `use_weighting` is the same without the cap at
1.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts
from jrl.algos.paired import Pair, pair_objective, positive
from jrl.ops import pair_losses
from jrl.types import traced

Array = jax.Array


@traced
class WPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1


def check(config: WPO, facts: Facts) -> None:
    positive("WPO.beta", config.beta, 0.1)


def loss(config: WPO, pair: Pair) -> Array:
    """Returns P30's weight times P5, of every pair, [..., S]."""
    aligned = pair.mean_logprob - pair.log_sum_squared / pair.length
    other_aligned = pair.other_mean_logprob - pair.other_log_sum_squared / pair.other_length
    weight = pair_losses.pair_weight(aligned, other_aligned)
    return weight * jax.nn.softplus(-config.beta * pair.margin)


OBJECTIVE = pair_objective(WPO, loss, check, log_sum_squared=True)
