"""Advantage-weighted likelihood of stored rows (A-LoL, R-GOLD): imitate rows that are better than
expected, weighted by how much.

Every function returns a token loss to be summed over each sequence: reduce it by G3 (mean over sequences of their token
sums). A row with a <= 0 has weight 0, and is better not drawn at all (A19). The weight is never differentiated.

Shared by all: arrays are [..., L] of one shape; `advantages` is the row's a on each of its tokens; float32 or wider
comes out, 0 where `mask` is False whatever the inputs hold there.

Source: Baheti et al. 2305.14718, their clip 0.9; R-GOLD is their form of Pang and He 2009.07839.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import ratios, reduce, segments

Array = jax.Array


def a_lol(
    logprobs: Array,
    ref_logprobs: Array,
    advantages: Array,
    mask: Array,
    segment: Array,
    *,
    num_segments: int,
    clip: float,
) -> Array:
    """Returns L15, A-LoL: -a * clip(exp(LP - LP_ref), 1 - clip, 1 + clip) * logprobs, LP the sum over the sequence.

    Args:
      ref_logprobs: of the model that the stored rows are compared with. segment: [..., L] int32, place of the token's
      sequence, num_segments or more elsewhere. clip: in (0, 1).
    """
    difference = ratios.log_ratio(logprobs, ref_logprobs, mask)
    total = segments.segment_sum(difference, mask, segment, num_segments=num_segments)
    ratio = jnp.exp(segments.to_tokens(ratios.clamp(total), segment))
    return _weighted(logprobs, advantages, mask, jnp.clip(ratio, 1 - clip, 1 + clip))


def a_lol_token(logprobs: Array, ref_logprobs: Array, advantages: Array, mask: Array, *, clip: float) -> Array:
    """Returns L15 with each token's clipped ratio instead of the sequence's ("A-LoL sequence" in the paper)."""
    ratio = ratios.ratio(logprobs, ref_logprobs, mask)
    return _weighted(logprobs, advantages, mask, jnp.clip(ratio, 1 - clip, 1 + clip))


def a_lol_ref_free(logprobs: Array, advantages: Array, mask: Array) -> Array:
    """Returns L15 with a ratio of 1, without a reference: -a * logprobs."""
    return _weighted(logprobs, advantages, mask, 1.0)


def a_lol_kl(logprobs: Array, ref_logprobs: Array, advantages: Array, mask: Array, *, coefficient: float) -> Array:
    """Returns L15 with a penalty instead of the ratio: -a * logprobs + coefficient * (logprobs - ref_logprobs).

    On stored rows this difference has a gradient in expectation, unlike k1 on samples of the policy (K2). Rows with
    a <= 0 have no penalty either.
    """
    penalty = ratios.log_ratio(logprobs, jax.lax.stop_gradient(ref_logprobs), mask)
    learned = reduce.masked(advantages, mask) > 0
    return a_lol_ref_free(logprobs, advantages, mask) + coefficient * jnp.where(learned, penalty, 0)


def r_gold(logprobs: Array, advantages: Array, mask: Array, *, floor: float) -> Array:
    """Returns L15 for R-GOLD: -a * max(p, floor) * logprobs with p the token's probability; floor 0.1 there."""
    return _weighted(logprobs, advantages, mask, jnp.maximum(jnp.exp(reduce.masked(logprobs, mask)), floor))


def _weighted(logprobs: Array, advantages: Array, mask: Array, ratio: Array | float) -> Array:
    weight = jax.lax.stop_gradient(jnp.maximum(reduce.masked(advantages, mask), 0) * ratio)
    return -weight * reduce.masked(logprobs, mask)
