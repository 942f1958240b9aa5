"""Importance weights for samples from a distribution other than the trained policy. Never differentiated (E7).

w = exp(old_logprobs - behaviour_logprobs): the learner's log-probs before the updates against those of the sampling
distribution (other kernels and dtypes, older weights, a truncated support). The learner must *recompute* old_logprobs:
if they were copied from the sampler, the PPO ratio would already include the mismatch and w would count it twice.

Weights multiply the policy loss. They are 1 where `mask` is False. Mind the sign: w is learner over sampler.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import ratios, reduce, segments

Array = jax.Array


def token_weights(old_logprobs: Array, behaviour_logprobs: Array, mask: Array, *, cap: float) -> Array:
    """Returns L9 by token: min(exp(old - behaviour), cap).

    Args:
      old_logprobs, behaviour_logprobs: [..., L] float. mask: [..., L] bool. cap: above 0.

    Returns:
      [..., L] float32 or wider, without gradient.

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training". Cap 2 in Tunix
    and open-instruct, 5 in AReaL; with sg(w) times PPO's clip this is AReaL's decoupled PPO, L11 (2505.24298 eq. 5).
    """
    return _truncated(ratios.log_ratio(old_logprobs, behaviour_logprobs, mask), cap)


def sequence_weights(
    old_logprobs: Array, behaviour_logprobs: Array, mask: Array, segment: Array, *, num_segments: int, cap: float
) -> Array:
    """Returns L9 by sequence: min(exp(sum of old - behaviour over the sequence), cap) for each of its tokens.

    The sum is clamped to +-20 (E9). Unbiased without the cap; its variance grows with the length.

    Args:
      old_logprobs, behaviour_logprobs: [..., L] float. mask: [..., L] bool. segment: [..., L] int32, S or more
        elsewhere.

    Returns:
      [..., L] float32 or wider, without gradient.

    Source: verl's default level, cap 2.
    """
    difference = ratios.log_ratio(old_logprobs, behaviour_logprobs, mask)
    total = segments.segment_sum(difference, mask, segment, num_segments=num_segments)
    return _truncated(segments.to_tokens(total, segment) * mask, cap)


def geometric_weights(
    old_logprobs: Array, behaviour_logprobs: Array, mask: Array, segment: Array, *, num_segments: int, cap: float
) -> Array:
    """Returns L9 by geometric mean: min(exp(mean of old - behaviour over the sequence), cap) for each of its tokens.

    Arguments and result as `sequence_weights`. AReaL and open-instruct call this one "sequence".
    """
    difference = ratios.log_ratio(old_logprobs, behaviour_logprobs, mask)
    mean = segments.segment_mean(difference, mask, segment, num_segments=num_segments)
    return _truncated(segments.to_tokens(mean, segment) * mask, cap)


def accepted(old_logprobs: Array, behaviour_logprobs: Array, mask: Array, *, low: float, high: float) -> Array:
    """Returns L10: the tokens of the mask whose weight is in [low, high], [..., L] bool.

    Limits are on w itself, not on its logarithm. Rejected tokens stay in the loss's denominator (as in AReaL; verl
    removes them), so that rejection makes a step smaller instead of giving the other tokens more weight.

    Source: IcePop, 0.5 and 5; verl, TRL and open-instruct have it under several names.
    """
    weights = jnp.exp(ratios.clamp(ratios.log_ratio(old_logprobs, behaviour_logprobs, mask)))
    return mask & (weights >= low) & (weights <= high)


def accepted_by_sequence(
    old_logprobs: Array,
    behaviour_logprobs: Array,
    mask: Array,
    segment: Array,
    *,
    num_segments: int,
    low: float,
    high: float,
) -> Array:
    """Returns L10 by sequence: the tokens of sequences whose product of weights, exp(sum), is in [low, high].

    Args:
      old_logprobs, behaviour_logprobs: [..., L] float. mask: [..., L] bool. segment: [..., L] int32, S or more
        elsewhere. low may be 0.

    Returns:
      [..., L] bool.

    Source: TRL's default, at most 3; verl.
    """
    difference = ratios.log_ratio(old_logprobs, behaviour_logprobs, mask)
    total = segments.segment_sum(difference, mask, segment, num_segments=num_segments)
    return _within(total, mask, segment, low, high)


def accepted_by_geometric_mean(
    old_logprobs: Array,
    behaviour_logprobs: Array,
    mask: Array,
    segment: Array,
    *,
    num_segments: int,
    low: float,
    high: float,
) -> Array:
    """Returns L10 by geometric mean: the tokens of sequences whose exp(mean) is in [low, high].

    Arguments and result as in `accepted_by_sequence`. It does not grow with the length, so limits are near 1.
    """
    difference = ratios.log_ratio(old_logprobs, behaviour_logprobs, mask)
    mean = segments.segment_mean(difference, mask, segment, num_segments=num_segments)
    return _within(mean, mask, segment, low, high)


def accepted_by_every_token(
    old_logprobs: Array,
    behaviour_logprobs: Array,
    mask: Array,
    segment: Array,
    *,
    num_segments: int,
    low: float,
    high: float,
) -> Array:
    """Returns L10 by the worst token: the tokens of sequences in which every token's weight is in [low, high].

    Arguments and result as `accepted_by_sequence`.
    """
    outside = mask & ~accepted(old_logprobs, behaviour_logprobs, mask, low=low, high=high)
    count = segments.segment_sum(outside, mask, segment, num_segments=num_segments)
    return mask & (segments.to_tokens(count, segment) == 0)


def near_policy(
    logprobs: Array,
    behaviour_logprobs: Array,
    advantages: Array,
    mask: Array,
    segment: Array,
    *,
    num_segments: int,
    delta: float,
) -> Array:
    """Returns L10's off-policy sequence mask (OPSM): all tokens but those of sequences with A < 0 and
    mean(behaviour - logprobs) > delta, [..., L] bool.

    Mistakes of a stale policy that the current one hardly makes any more need not be pushed down.

    Args:
      logprobs: [..., L] float, of the current policy; no gradient is taken. behaviour_logprobs, advantages: same shape;
        the advantage is the same for every token of a sequence. mask: same, bool. segment: [..., L] int32.
      delta: nats per token.

    Source: DeepSeek-V3.2; TRL and slime.
    """
    drift = ratios.log_ratio(behaviour_logprobs, jax.lax.stop_gradient(logprobs), mask)
    mean = segments.segment_mean(drift, mask, segment, num_segments=num_segments)
    return mask & ~((reduce.masked(advantages, mask) < 0) & (segments.to_tokens(mean, segment) > delta))


def _within(log_weight: Array, mask: Array, segment: Array, low: float, high: float) -> Array:
    weight = segments.to_tokens(jnp.exp(ratios.clamp(log_weight)), segment)
    return mask & (weight >= low) & (weight <= high)


def _truncated(log_weights: Array, cap: float) -> Array:
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(ratios.clamp(log_weights)), cap))
