"""Offline Q-learning with the logits as values."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def expectile(error: Array, tau: Array | float) -> Array:
    """Returns P31's value loss, |tau - 1[e < 0]| e^2 with e = Q - V: V becomes the tau-expectile of Q.

    Source: IQL (Kostrikov et al. 2110.06169 eq. 5), in ILQL 2206.11871.
    """
    error = reduce.widen(error)
    return jnp.abs(tau - (error < 0)) * error**2


def q_error(q: Array, reward: Array, next_value: Array, discount: Array | float) -> Array:
    """Returns P31's Q loss, (r + gamma V(s') - Q)^2. `next_value` is 0 at an episode's end and carries no gradient.

    Source: ILQL 2206.11871.
    """
    reward, next_value, q = map(reduce.widen, (reward, next_value, q))
    return (reward + discount * jax.lax.stop_gradient(next_value) - q) ** 2


def conservative_q(logits: Array, action: Array) -> Array:
    """Returns P31's CQL term, -log softmax(Q)[a]: Q of what the data did not do is held down.

    Args:
      logits: [..., V] float, Q of every token. action: [...] int32.

    Source: ILQL 2206.11871.
    """
    logits = reduce.widen(logits)
    chosen = jnp.take_along_axis(logits, action[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def inverse_soft_q(logprob: Array, value: Array, next_value: Array, discount: Array | float, weight: Array | float):
    """Returns P32, -log pi(a|s) + lam (V(s) + log pi(a|s) - gamma V(s'))^2: imitation that keeps the rewards that its
    logits imply small. The logits are Q, V = logsumexp Q, log pi = Q - V.

    Args:
      logprob: [...] float. value: [...] float, V at the token's state. next_value: [...] float, V at the next one, 0
        after the end token. weight: lam, at least 0; 0 is maximum likelihood.

    Returns:
      [...] float, a loss for every token of the response, its end token included.

    Source: Wulfmeier et al. 2409.01369; the clamps of some releases are left out.
    """
    logprob, value, next_value = map(reduce.widen, (logprob, value, next_value))
    return -logprob + weight * (value + logprob - discount * next_value) ** 2
