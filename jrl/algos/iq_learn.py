"""IQLearn: imitation by inverse reinforcement learning: logits are Q-values of an implied reward that is kept small.

    Q = logits, V = logsumexp Q, log pi = Q - V
    l_t = -log pi(y_t | s_t) + weight * (V(s_t) + log pi(y_t | s_t) - discount * V(s_{t+1}))^2             P32
    L   = mean over all tokens of the step                                                                 G1

V is 0 after the last token of a completion. The square penalizes the reward that the logits imply; without it the loss
is SFT's, which does not constrain the scale of the logits.

Source: Wulfmeier et al. 2409.01369; the clamps of some releases are left out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos.contract import Facts, Needs, Objective, Tokens
from jrl.algos.paired import positive
from jrl.ops import reduce
from jrl.ops.segments import next_column
from jrl.ops.soft_q import inverse_soft_q
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class IQLearn:
    weight: float = 0.1  # of the squared implied reward
    discount: float = 1.0  # of the next state's value


def check(config: IQLearn, facts: Facts) -> None:
    positive("IQLearn.weight", config.weight, 0.1)
    if not 0 < config.discount <= 1:
        raise ValueError(f"IQLearn.discount = {config.discount} must be above 0 and at most 1; 1 is usual")


def token_loss(config: IQLearn, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P32 of every token, [..., L], 0 where masked; and the reward that the logits imply."""
    logprobs, values = (reduce.masked(x, tokens.mask) for x in (tokens.logprobs, tokens.state_values))
    has_next = next_column(tokens.mask) & (next_column(tokens.segment, -1) == tokens.segment)
    next_values = jnp.where(has_next, next_column(values), 0)
    loss = inverse_soft_q(logprobs, values, next_values, config.discount, config.weight)
    implied = jax.lax.stop_gradient(values + logprobs - config.discount * next_values)
    return reduce.masked(loss, tokens.mask), {"iq_learn/implied_reward": reduce.masked(implied, tokens.mask)}


OBJECTIVE = Objective(config=IQLearn, check=check, needs=lambda config: Needs(state_values=True), token_loss=token_loss)
