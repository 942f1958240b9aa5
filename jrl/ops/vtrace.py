"""V-trace: values and advantages of the current policy from samples of another. Nothing carries a gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def vtrace(
    token_reward: Array,
    values: Array,
    weights: Array,
    action_mask: Array,
    *,
    discount: float,
    gae_lambda: float,
    max_weight: float,
    max_trace: float,
) -> tuple[Array, Array]:
    """Returns A16, V-trace: (advantages of the policy gradient, value targets vs), from the end of a row to its start,

        rho_t = min(w_t, max_weight),  c_t = gae_lambda * min(w_t, max_trace)
        vs_t = v_t + rho_t (r_t + discount v_{t'} - v_t) + discount c_t (vs_{t'} - v_{t'})
        A_t  = rho_t (r_t + discount vs_{t'} - v_t)

    with t' the next sampled token, and v = vs = 0 after the last. Tokens that the policy did not sample are skipped, as
    in A13, and a reward on them counts for the sampled token before. A weight of 0 (a rejected token) ends the trace:
    nothing after it reaches vs before it. With all weights 1, vs - v is GAE.

    Args:
      token_reward: [N, T] float. values: [N, T] float, of the state before the token is chosen.
      weights: [N, T] float, w = exp(old_logprobs - behaviour_logprobs). action_mask: [N, T] bool.
      max_weight, max_trace: rho-bar and c-bar; which policy the values converge to, and how fast.

    Returns:
      [N, T] float32 or wider each, 0 where not an action.

    Source: Espeholt et al. 1802.01561 eq. 1 and section 4.2, both bounds 1. rlax.vtrace_td_error_and_advantage is the
    same at gae_lambda = 1; below it, its advantages bootstrap from gae_lambda * vs' + (1 - gae_lambda) * v'.
    """
    values, weights = reduce.masked(values, action_mask), reduce.masked(weights, action_mask)
    dtype = jnp.result_type(reduce.widen(token_reward), values, weights)
    start = reduce.zeros_of_rows(values, dtype)
    weights = weights.astype(dtype)
    rho, trace = jnp.minimum(weights, max_weight), gae_lambda * jnp.minimum(weights, max_trace)
    columns = (*(x.T.astype(dtype) for x in (token_reward, values, rho, trace)), action_mask.T)
    carry = (start, start, start), jnp.asarray(discount)
    advantages, targets = jax.lax.scan(_token_before, carry, columns, reverse=True)[1]
    return advantages.T, targets.T


def _token_before(later: tuple, column: tuple) -> tuple[tuple, tuple[Array, Array]]:
    """A16 for one column; a module-level function with the rate in the carry, as in `jrl.ops.gae`."""
    (next_value, next_target, pending_reward), discount = later
    reward, value, rho, trace, is_action = column
    reward = reward + pending_reward
    target = value + rho * (reward + discount * next_value - value) + discount * trace * (next_target - next_value)
    target = target.astype(value.dtype)
    advantage = (rho * (reward + discount * next_target - value)).astype(value.dtype)
    carry = (
        jnp.where(is_action, value, next_value),
        jnp.where(is_action, target, next_target),
        jnp.where(is_action, 0, reward),
    )
    return (carry, discount), (jnp.where(is_action, advantage, 0), jnp.where(is_action, target, 0))
