"""Decoupled PPO: the trust region is around a recent policy, and a weight corrects for the older policy that
sampled."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import importance, ratios, reduce, surrogate

Array = jax.Array


def decoupled_clipped(
    logprobs: Array,
    old_logprobs: Array,
    behaviour_logprobs: Array,
    advantages: Array,
    mask: Array,
    *,
    clip_low: float,
    clip_high: float,
    cap: float,
) -> Array:
    """Returns L11: min(exp(old - behaviour), cap) times PPO's clip (L2) of exp(logprobs - old).

    `old_logprobs` are those of the proximal policy: the weights before the batch's updates, recomputed by the learner,
    or `interpolated_logprobs`. Plain PPO on the sampler's log-probs would put its trust region around a policy that is
    several versions old.

    Args:
      logprobs: [..., L] float, differentiated. old_logprobs, behaviour_logprobs, advantages: same shape, float, fixed.
      mask: same shape, bool. cap: largest weight, above 0.

    Returns:
      [..., L] float32 or wider, 0 where masked.

    Source: Fu et al. 2505.24298 (AReaL) eq. 5; its cap is 5.
    """
    weights = importance.token_weights(old_logprobs, behaviour_logprobs, mask, cap=cap)
    loss = surrogate.clipped(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    return weights * loss


def interpolated_logprobs(
    logprobs: Array, behaviour_logprobs: Array, mask: Array, behaviour_version: Array, *, old_version: int, version: int
) -> Array:
    """Returns L11's proximal log-probs without a forward pass, interpolated log-linearly between two known policies:

        behaviour + alpha * (logprobs - behaviour),  alpha = (old_version - v) / (version - v)

    with v the version that drew the token; alpha is 1 if that is the current one.

    Args:
      logprobs, behaviour_logprobs: [..., L] float. mask: [..., L] bool.
      behaviour_version: [..., L] int32. old_version: of the weights before the batch's updates.
      version: of the weights that computed `logprobs`.

    Returns:
      [..., L] float32 or wider, without gradient, 0 where masked.

    Source: Li et al. 2512.06547 (A-3PO); AReaL's "loglinear" proximal log-probs.
    """
    new, behaviour = (reduce.masked(jax.lax.stop_gradient(x), mask) for x in (logprobs, behaviour_logprobs))
    age = version - behaviour_version
    alpha = jnp.where(age > 0, (old_version - behaviour_version) / jnp.maximum(age, 1), 1)
    return behaviour + alpha.astype(new.dtype) * ratios.log_ratio(new, behaviour, mask)
