"""Mix-policy gradients: PPO's clip on samples of an earlier policy, around the latest policy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import ratios, reduce

Array = jax.Array


def mix_policy_clipped(
    logprobs: Array,
    old_logprobs: Array,
    sampled_logprobs: Array,
    advantages: Array,
    mask: Array,
    *,
    clip: float,
) -> Array:
    """Returns L12, ReMix: -min(rho * A, clip(rho, c - clip, c + clip) * A) with

        rho = exp(logprobs - sampled_logprobs),  c = exp(old_logprobs - sampled_logprobs)

    so that the trust region is around the policy before the updates, for a token that an earlier policy drew. For fresh
    tokens c = 1, and it is PPO's clip (L2). A ratio exactly at the bound is not clipped.

    Args:
      logprobs: [..., L] float, differentiated. old_logprobs: same shape, of the policy before the updates, k.
      sampled_logprobs: same shape, of the policy that drew the token, k - i, computed by the learner. advantages: same
        shape. These three are fixed. mask: same shape, bool.

    Returns:
      [..., L] float32 or wider, 0 where masked.

    Source: ReMix, 2507.06892: a share of 0.4 of the rows from the last 2 policies, 2 updates a batch, and at step T (50
    to 100) the reference becomes the policy and learning goes on with fresh rows alone.
    """
    advantages = reduce.masked(jax.lax.stop_gradient(advantages), mask)
    rho = ratios.ratio(logprobs, sampled_logprobs, mask)
    center = jax.lax.stop_gradient(ratios.ratio(old_logprobs, sampled_logprobs, mask))
    rho = jnp.where((advantages > 0) & (rho > center + clip), center + clip, rho)
    rho = jnp.where((advantages < 0) & (rho < center - clip), center - clip, rho)
    return -rho * advantages
