"""Policy losses with one ratio per sequence. The loss of a sequence is put on each of its tokens.

Reduce them by G2, the mean over sequences of the mean over their tokens: that is the mean of the sequences' losses. A
token mean (G1) would weigh a sequence by its length.

Shared by all: `logprobs` is differentiated; `old_logprobs` and `advantages` never are; arrays are [..., L] of one
shape, float32 or wider comes out, and 0 where `mask` is False whatever the inputs hold there. The mean or sum of
log-ratios is clamped to +-20 (E9). A ratio exactly at the bound is not clipped.

Args of all:
  logprobs, old_logprobs, advantages: [..., L] float. mask: [..., L] bool.
  segment: [..., L] int32, place of the token's sequence in its row, num_segments or more elsewhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import ratios, reduce, segments
from jrl.ops.surrogate import clip_ratio

Array = jax.Array


def gspo(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    segment: Array,
    *,
    num_segments: int,
    clip_low: float,
    clip_high: float,
) -> Array:
    """Returns L5, GSPO: -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A) with s = exp(mean over the sequence of
    logprobs - old_logprobs).

    The advantage must be the same for every token of a sequence; where it is not, use `gspo_token` (L6).

    Source: Zheng et al. 2507.18071 eq. 5 to 7, clips 3e-4 and 4e-4. AReaL reduces it by a token mean; TRL's LUSPO
    multiplies the loss of a sequence by its length.
    """
    s = mean_ratio(logprobs, old_logprobs, mask, segment, num_segments=num_segments)
    advantages = reduce.masked(jax.lax.stop_gradient(advantages), mask)
    return -clip_ratio(s, advantages, clip_low, clip_high) * advantages


def gspo_token(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    segment: Array,
    *,
    num_segments: int,
    clip_low: float,
    clip_high: float,
) -> Array:
    """Returns L6, GSPO-token: PPO's clip of sg(s) * exp(logprobs - sg(logprobs)), s as in `gspo`.

    Its value is that of L5; the gradient of a token is its own advantage times s, so that advantages may differ within
    a sequence.

    Source: Zheng et al. 2507.18071 eq. 13 and 14; the only form in verl.
    """
    s = jax.lax.stop_gradient(mean_ratio(logprobs, old_logprobs, mask, segment, num_segments=num_segments))
    s = s * ratios.ratio(logprobs, logprobs, mask)  # exp(0): 1 with the gradient of the token
    advantages = reduce.masked(jax.lax.stop_gradient(advantages), mask)
    return -clip_ratio(s, advantages, clip_low, clip_high) * advantages


def sequence_clipped(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    segment: Array,
    *,
    num_segments: int,
    clip_low: float,
    clip_high: float,
) -> Array:
    """Returns L7: PPO's clip of the ratio of the whole sequence, exp(sum over it of logprobs - old_logprobs).

    The sequence is one action of a bandit. The ratio grows or shrinks exponentially with the length: use one or two
    updates per batch.

    Source: Ahmadian et al. 2402.14740 as in TRL's RLOO, clip 0.2.
    """
    difference = ratios.log_ratio(logprobs, jax.lax.stop_gradient(old_logprobs), mask)
    total = segments.segment_sum(difference, mask, segment, num_segments=num_segments)
    rho = jnp.exp(segments.to_tokens(ratios.clamp(total), segment))
    advantages = reduce.masked(jax.lax.stop_gradient(advantages), mask)
    return -clip_ratio(rho, advantages, clip_low, clip_high) * advantages


def mean_ratio(logprobs: Array, old_logprobs: Array, mask: Array, segment: Array, *, num_segments: int) -> Array:
    """Returns s of L5 on the tokens of each sequence, 1 on padding: exp(mean of logprobs - sg(old_logprobs))."""
    difference = ratios.log_ratio(logprobs, jax.lax.stop_gradient(old_logprobs), mask)
    mean = segments.segment_mean(difference, mask, segment, num_segments=num_segments)
    return jnp.exp(segments.to_tokens(ratios.clamp(mean), segment))
