"""rlax's returns, GAE, V-trace, clipped surrogate and two-hot transforms: over one dense sequence of sampled tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import rlax

Array = np.ndarray
Answer = tuple[np.ndarray, np.ndarray | None]


def dense(mask: Array, *arrays: Array) -> tuple[Array, ...]:
    """Returns the masked entries of [N, T] arrays moved to the front of each row, and 1 for each: 0 after them."""
    order = np.argsort(~mask, axis=1, kind="stable")
    front = np.take_along_axis(mask, order, axis=1)
    moved = (np.where(front, np.take_along_axis(array, order, axis=1), 0) for array in arrays)
    return (*moved, front)


def spread(mask: Array, x: Array) -> Array:
    """Returns entries at the front of each row back in the places of the mask, 0 elsewhere."""
    order = np.argsort(np.argsort(~mask, axis=1, kind="stable"), axis=1)
    return np.where(mask, np.take_along_axis(np.asarray(x), order, axis=1), 0)


def discounts(present: Array, discount: float) -> Array:
    """Returns the discount of each step, 0 from the last on: nothing follows it."""
    return np.float32(discount) * np.pad(present, ((0, 0), (0, 1)))[:, 1:]


@jax.jit
def _returns(reward, step_discount):
    return jax.vmap(lambda r, d: rlax.discounted_returns(r, d, jnp.zeros_like(r)))(reward, step_discount)


def discounted_returns(token_reward, action_mask, discount) -> Answer:
    reward, present = dense(action_mask, token_reward)
    return spread(action_mask, _returns(reward, discounts(present, discount))), None


@jax.jit
def _gae(reward, step_discount, gae_lambda, values):
    values = jnp.pad(values, ((0, 0), (0, 1)))
    estimate = lambda r, d, v: rlax.truncated_generalized_advantage_estimation(r, d, gae_lambda, v)
    return jax.vmap(estimate)(reward, step_discount, values)


def gae(token_reward, values, action_mask, discount, gae_lambda) -> Answer:
    reward, value, present = dense(action_mask, token_reward, values)
    return spread(action_mask, _gae(reward, discounts(present, discount), gae_lambda, value)), None


@functools.partial(jax.jit, static_argnames=("part",))
def _vtrace(values, reward, step_discount, weights, gae_lambda, max_weight, part):
    after = jnp.pad(values, ((0, 0), (0, 1)))[:, 1:]

    def of_row(v, v_next, r, d, w):
        output = rlax.vtrace_td_error_and_advantage(v, v_next, r, d, w, gae_lambda, max_weight, max_weight)
        return output.errors + v if part == "targets" else output.pg_advantage

    return jax.vmap(of_row)(values, after, reward, step_discount, weights)


def vtrace(part: str):
    def row(token_reward, values, weights, action_mask, discount, gae_lambda, max_weight, **rest) -> Answer:
        reward, value, weight, present = dense(action_mask, token_reward, values, weights)
        steps = discounts(present, discount)
        return spread(action_mask, _vtrace(value, reward, steps, weight, gae_lambda, max_weight, part)), None

    return row


@functools.partial(jax.jit, static_argnames=("count",))
def _clipped(logprobs, old, advantages, epsilon, count):
    def loss(lp):
        return rlax.clipped_surrogate_pg_loss(jnp.exp(lp - old)[:count], advantages[:count], epsilon)

    return jax.value_and_grad(loss)(logprobs)


def clipped_surrogate(logprobs, old_logprobs, advantages, mask, clip_low, **rest) -> Answer:
    order = np.argsort(~mask.ravel(), kind="stable")
    front = [array.ravel()[order] for array in (logprobs, old_logprobs, advantages)]
    value, slope = _clipped(*front, clip_low, int(mask.sum()))
    placed = np.zeros(mask.size, np.float32)
    placed[order] = slope
    return np.asarray(value), placed.reshape(mask.shape)


@jax.jit
def _policy_gradient(logprobs, advantages, weights):
    def loss(lp):
        logits = jnp.stack([lp, jnp.log1p(-jnp.exp(lp))], axis=-1)  # two tokens, the first was drawn
        return rlax.policy_gradient_loss(logits, jnp.zeros(lp.shape, int), advantages, weights)

    return loss(logprobs)


def policy_gradient(logprobs, advantages, mask) -> Answer:
    safe = np.where(mask, logprobs, -1).astype(np.float32).ravel()
    value = _policy_gradient(safe, advantages.ravel(), mask.ravel().astype(np.float32))
    scale = mask.size / mask.sum()  # its mean is over all entries
    return np.asarray(value) * scale, None


def two_hot(x, bins) -> Answer:
    return np.asarray(rlax.transform_to_2hot(x, float(bins[0]), float(bins[-1]), len(bins))), None


def from_two_hot(logits, bins) -> Answer:
    probability = jax.nn.softmax(logits)
    mean = rlax.transform_from_2hot(probability, float(bins[0]), float(bins[-1]), len(bins))
    return np.asarray(rlax.signed_expm1(mean)), None


ROWS = {
    "discounted_returns": discounted_returns,
    "truncated_generalized_advantage_estimation": gae,
    "vtrace targets": vtrace("targets"),
    "vtrace advantages": vtrace("advantages"),
    "clipped_surrogate_pg_loss": clipped_surrogate,
    "policy_gradient_loss": policy_gradient,
    "signed_logp1": lambda x: (np.asarray(rlax.signed_logp1(x)), None),
    "signed_expm1": lambda x: (np.asarray(rlax.signed_expm1(x)), None),
    "transform_to_2hot": two_hot,
    "transform_from_2hot": from_two_hot,
}
