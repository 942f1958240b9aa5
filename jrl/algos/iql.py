"""IQL: implicit Q-learning on the tokens of stored answers that have a reward, good and bad ones.

    delta_t = r_t + discount * V(s_{t+1}) - V(s_t), r_t the reward of the row at its last token and 0 before
    l_t     = -min(exp(delta_t / beta), max_weight) * lp_t                                                L16
              + value_coefficient * |tau - 1[delta_t < 0]| * delta_t^2                                    P31
    L       = mean over all tokens of the step, of which those of a row without a reward are 0            G1

V is a value head on the policy: the better part (tau) of what its state leads to in the data, so that a token is
imitated by what it changed, also where no whole answer in the data is the best. The state after the last learned token
has value 0. No gradient goes through V(s_{t+1}) or the weights.

A token leads to one state: its Q is r_t + discount * V(s_{t+1}), and no network of its own learns it. Another speaker's
turn is stepped over; after it there are several states, and V, an expectile, takes the better ones for more likely.

Source: Kostrikov et al. 2110.06169 and, of tokens, ILQL, Snell et al. 2206.11871. ILQL learns Q with two heads, their
moving averages and a conservative term, and adds (Q - V) / beta to the logits of a frozen model when it samples. Here
the policy learns that by weighted imitation, as IQL does, so that it is sampled and exported like any model.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.algos import common
from jrl.algos.contract import Facts, Needs, Objective, Tokens
from jrl.ops import awr, reduce, segments
from jrl.ops.soft_q import expectile
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class IQL:
    tau: float = 0.7  # which expectile of what follows in the data V is; 0.5: the mean
    beta: float = 0.25  # temperature of the weights, in rewards; ILQL's 1 / beta is 1 to 4
    max_weight: float = 20.0  # largest weight
    discount: float = 1.0  # of the next state's value
    value_coefficient: float = 1.0  # weight of the value loss


def check(config: IQL, facts: Facts) -> None:
    common.check_positive(
        config,
        {
            "beta": "weights are exp(A / beta), A in rewards. 0.25 is usual for rewards of 0 and 1.",
            "value_coefficient": "at 0 the value head would never learn. 1.0 is usual.",
        },
    )
    if not 0.5 <= config.tau < 1:
        raise ValueError(
            f"IQL.tau = {config.tau} must be at least 0.5, the mean, and below 1, the best that the data have. 0.7 is "
            "usual."
        )
    common.check_largest_weight(config)
    if not 0 < config.discount <= 1:
        raise ValueError(f"IQL.discount = {config.discount} must be above 0 and at most 1; 1 is usual")


def check_stored(config: IQL, value: np.ndarray) -> None:
    """Raises ValueError where all rows of a data set have one reward. value: [n, 1] float, NaN where there is none."""
    rewards = np.unique(value[~np.isnan(value)])
    if len(rewards) < 2:
        raise ValueError(
            f"IQL: the {len(value)} stored rows have the rewards {rewards.tolist()}: no answer is better than another, "
            "so nothing would be learned that SFT does not teach. Check the entry that the source's values name."
        )


def token_loss(config: IQL, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P31 and L16 of every token, [..., L], 0 where masked or of a row without a reward; and metrics."""
    mask = tokens.mask & ~jnp.isnan(tokens.row_values[..., 0])
    tokens = tokens.replace(mask=mask)
    values = reduce.masked(tokens.values, mask)
    following, goes_on = segments.following(jax.lax.stop_gradient(values), mask, tokens.segment)
    earned = reduce.masked(tokens.row_values[..., 0], mask)
    delta = jnp.where(goes_on, 0, earned) + config.discount * following - values
    weighting = dict(beta=config.beta, max_weight=config.max_weight)
    imitation = awr.awr(tokens.logprobs, delta, mask, **weighting)
    wrong = expectile(delta, config.tau)
    metrics = {
        "advantage/mean": delta,
        "advantage/weight": awr.awr_weights(delta, **weighting),
        "stored/reward_logprob": earned * tokens.logprobs,
        "stored/reward": earned,
        "value/loss": wrong,
        "value/mean": values,
    }
    return imitation + config.value_coefficient * wrong, common.metrics_of(tokens, metrics)


OBJECTIVE = Objective(
    config=IQL,
    check=check,
    needs=lambda config: Needs(values=True, row_values=True, row_value_names=("the reward",)),
    check_stored=check_stored,
    token_loss=token_loss,
)
