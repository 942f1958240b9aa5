"""Importance weights for samples that another distribution than the trained policy drew. Never differentiated (E7).

w = exp(old_logprobs - behaviour_logprobs): the learner's own log-probs at the start of the update over those of the
sampling distribution (other kernels and dtypes, older weights, a truncated support). The learner must *recompute*
old_logprobs: were they copied from the sampler, the PPO ratio would hold the mismatch already and w would count it
twice.

Weights multiply the policy loss. They are 1 where `mask` is False. Off by one sign is easy: w is learner over sampler.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import ratios, segments

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

    Limits are on w itself, not on its logarithm. The rejected stay in the loss's denominator (as in AReaL; verl shrinks
    it), so that rejection makes a step smaller instead of its rest louder.

    Source: IcePop, 0.5 and 5; verl, TRL and open-instruct have it under several names.
    """
    weights = jnp.exp(ratios.clamp(ratios.log_ratio(old_logprobs, behaviour_logprobs, mask)))
    return mask & (weights >= low) & (weights <= high)


def _truncated(log_weights: Array, cap: float) -> Array:
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(ratios.clamp(log_weights)), cap))
