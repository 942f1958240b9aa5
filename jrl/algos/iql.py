"""IQL: implicit Q-learning on the tokens of stored answers with rewards, good and bad ones.

    delta_t = r_t + discount * V(s_{t+1}) - V(s_t), r_t the row's reward at its last token and 0 before
    l_t     = -min(exp(delta_t / beta), max_weight) * lp_t                                                L16
              + value_coefficient * |tau - 1[delta_t < 0]| * delta_t^2                                    P31
    L       = mean over all tokens of the step; tokens of a row without a reward have loss 0              G1

V is a value head on the policy. It learns the tau-expectile of what follows a state in the data, so a token is imitated
for its own contribution, even if no stored answer is best as a whole. The state after the last trained token has value
0. No gradient goes through V(s_{t+1}) or the weights.

A token leads to a single state, so its Q is r_t + discount * V(s_{t+1}) and there is no separate Q network. Other
speakers' turns are skipped; the state after one is random, and V, an expectile, is then optimistic.

Source: Kostrikov et al. 2110.06169 and, for tokens, ILQL, Snell et al. 2206.11871. ILQL learns Q with two heads, their
moving averages and a conservative term, and adds (Q - V) / beta to the logits of a frozen model when it samples. Here
the policy learns this by weighted imitation, as in IQL, so it is sampled and exported like any model.
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
    """Raises ValueError if all rows of a data set have the same reward. value: [n, 1] float, NaN if there is none."""
    rewards = np.unique(value[~np.isnan(value)])
    if len(rewards) < 2:
        raise ValueError(
            f"IQL: the {len(value)} stored rows have the rewards {rewards.tolist()}: no answer is better than another, "
            "so nothing would be learned that SFT does not teach. Check the entry that the source's values name."
        )


def token_loss(config: IQL, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P31 and L16 of every token, [..., L], 0 where masked or in a row without a reward; and metrics."""
    mask = tokens.mask & ~jnp.isnan(tokens.row_values[..., 0])
    tokens = tokens.replace(mask=mask)
    values = reduce.masked(tokens.values, mask)
    next_values, has_next = segments.following(jax.lax.stop_gradient(values), mask, tokens.segment)
    reward = reduce.masked(tokens.row_values[..., 0], mask)
    delta = jnp.where(has_next, 0, reward) + config.discount * next_values - values
    imitation = awr.awr(tokens.logprobs, delta, mask, beta=config.beta, max_weight=config.max_weight)
    value_loss = expectile(delta, config.tau)
    metrics = {
        "advantage/mean": delta,
        "advantage/weight": awr.awr_weights(delta, beta=config.beta, max_weight=config.max_weight),
        "stored/reward_logprob": reward * tokens.logprobs,
        "stored/reward": reward,
        "value/loss": value_loss,
        "value/mean": values,
    }
    return imitation + config.value_coefficient * value_loss, common.metrics_of(tokens, metrics)


OBJECTIVE = Objective(
    config=IQL,
    check=check,
    needs=lambda config: Needs(values=True, row_values=True, row_value_names=("the reward",)),
    check_stored=check_stored,
    token_loss=token_loss,
)
