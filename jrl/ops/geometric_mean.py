"""GMPO: the geometric mean of a sequence's ratios, each clipped before the mean."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import ratios, reduce, segments

Array = jax.Array


def gmpo(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    segment: Array,
    *,
    num_segments: int,
    log_clip_low: float,
    log_clip_high: float,
) -> Array:
    """Returns L19, -s * A on the tokens of each sequence, to be reduced by G2 (the mean over sequences):

        s = exp(mean over the sequence of d'),  d = logprobs - old_logprobs
        d' = min(d, log_clip_high) where A > 0,  max(d, -log_clip_low) where A < 0

    A single outlier moves a geometric mean less than an arithmetic one. A token beyond its bound has no gradient.

    Args:
      logprobs: [..., L] float, differentiated. old_logprobs: same shape, float, fixed.
      advantages: same shape, float, fixed, the same for every token of a sequence. mask: same shape, bool.
      segment: [..., L] int32, place of the token's sequence, num_segments or more elsewhere.
      log_clip_low, log_clip_high: at least 0, nats: bounds of the log-ratio.

    Returns:
      [..., L] float32 or wider, 0 where masked.

    Source: Zhao et al. 2507.20673, bounds (exp(-0.4), exp(0.4)); verl.
    """
    advantages = reduce.masked(jax.lax.stop_gradient(advantages), mask)
    d = ratios.log_ratio(logprobs, jax.lax.stop_gradient(old_logprobs), mask)
    d = jnp.where((advantages > 0) & (d > log_clip_high), log_clip_high, d)
    d = jnp.where((advantages < 0) & (d < -log_clip_low), -log_clip_low, d)
    mean = segments.segment_mean(d, mask, segment, num_segments=num_segments)
    return -jnp.exp(segments.to_tokens(ratios.clamp(mean), segment)) * advantages
