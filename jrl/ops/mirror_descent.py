"""Kimi's mirror descent: the policy gradient with a squared distance to the policy of the last iteration.

The loss of a sequence is put on each of its tokens and reduced by G2, which is the mean over sequences.

The distance is to the policy at the start of an iteration (`old_logprobs`). It changes with every iteration, and the
optimizer's moments are then those of another problem: Kimi resets them. Here an iteration is a step, whose
`old_logprobs` are recomputed before its updates.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce, segments

Array = jax.Array


def mirror_descent(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    segment: Array,
    *,
    num_segments: int,
    tau: float,
) -> Array:
    """Returns L13 on the tokens of each sequence: -A * LP + tau / 2 * (LP - LP_old)^2, LP the sum of its log-probs.

    The second term acts even if all advantages of a group are 0.

    Args:
      logprobs: [..., L] float, differentiated. old_logprobs: same shape, fixed. mask: same shape, bool.
      advantages: same shape, fixed, R - mean_g, the same for every token of a sequence.
      segment: [..., L] int32, place of the token's sequence, num_segments or more elsewhere.
      tau: at least 0, strength of the pull to the old policy.

    Returns:
      [..., L] float32 or wider, 0 where masked.

    Source: Kimi k1.5, 2501.12599 section 2.3.2.
    """
    total = lambda x: segments.segment_sum(x, mask, segment, num_segments=num_segments)
    return _pulled(total, logprobs, old_logprobs, advantages, mask, segment, tau)


def mean_mirror_descent(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    segment: Array,
    *,
    num_segments: int,
    tau: float,
) -> Array:
    """Returns L13 with LP the mean of a sequence's log-probs, which removes the length from both terms.

    Arguments and result as `mirror_descent`.
    """
    mean = lambda x: segments.segment_mean(x, mask, segment, num_segments=num_segments)
    return _pulled(mean, logprobs, old_logprobs, advantages, mask, segment, tau)


def _pulled(
    of_sequence, logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, segment: Array, tau: float
) -> Array:
    to_tokens = lambda x: jnp.where(mask, segments.to_tokens(of_sequence(x), segment), 0)
    new = to_tokens(logprobs)
    moved = new - to_tokens(jax.lax.stop_gradient(old_logprobs))
    return -reduce.masked(jax.lax.stop_gradient(advantages), mask) * new + tau / 2 * jnp.square(moved)
