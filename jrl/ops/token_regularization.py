"""Token rewards out of a model's own contrast, and DPO with them as a regularizer (T-REG)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import ratios, reduce
from jrl.ops.segments import same_unit, segment_count, segment_start, to_tokens

Array = jax.Array


def contrastive_token_reward(better: Array, worse: Array, mask: Array) -> Array:
    """Returns P25's r_t = sigmoid(lp_better_t - lp_worse_t) - 1/2, [..., T] float32 or wider, 0 where masked.

    Args:
      better, worse: [..., T] float, log-probs of an answer's tokens under one model, asked for a good and for a bad
        answer; the log-ratio is clamped (E9).
      mask: [..., T] bool, tokens of the answer; False where one of the two prompts did not fit.

    Source: T-REG, Zhou et al. 2412.02685.
    """
    contrast = ratios.clamp(ratios.log_ratio(better, worse, mask))
    return jax.lax.stop_gradient(reduce.masked(jax.nn.sigmoid(contrast) - 0.5, mask))


def token_contrast(ref_logprobs: Array, mask: Array, segment: Array, label: Array, unit: Array, counts: Array) -> Array:
    """Returns P25's r_t of the answers in packed rows that have the same answer after two other prompts beside them,
    [..., L] float32 or wider; 0 elsewhere, and where a row lacks one of them or they are cut differently.

    Within a unit an answer is labeled y >= 0, the same answer after the prompt that asks for a good one y - 2, and
    after the one that asks for a bad one y - 4.

    Args:
      ref_logprobs: [..., L] float, of packed rows. mask: [..., L] bool, tokens of answers, adjacent in a sequence.
        segment: [..., L] int32. label: [..., S] float. unit: [..., S] int32. counts: [..., S] bool.
    """
    ref_logprobs = reduce.masked(ref_logprobs, mask)
    column = jnp.broadcast_to(jnp.arange(mask.shape[-1], dtype=jnp.int32), mask.shape)
    start = segment_start(mask, segment, num_segments=label.shape[-1])
    length = segment_count(mask, segment, num_segments=label.shape[-1])
    beside = same_unit(unit, counts)
    answers = beside & (label >= 0)[..., :, None]

    def after(offset: float) -> tuple[Array, Array]:
        """Returns the log-prob of every answer's token after the other prompt, and where there is one."""
        partner = answers & (label[..., None, :] == label[..., :, None] + offset)
        of_partner = lambda x: jnp.sum(jnp.where(partner, x[..., None, :], 0), axis=-1)
        alike = partner.any(-1) & (of_partner(length) == length)
        there = mask & (to_tokens(alike.astype(jnp.int32), segment) > 0)
        at = jnp.where(there, column + to_tokens(of_partner(start) - start, segment), 0)
        return jnp.take_along_axis(ref_logprobs, at, axis=-1), there

    (better, has_better), (worse, has_worse) = after(-2.0), after(-4.0)
    return contrastive_token_reward(better, worse, has_better & has_worse)


def token_regularizer(logprobs: Array, token_reward: Array, mask: Array, *, beta: Array | float) -> Array:
    """Returns P25's REG(y) = -sum_t beta r_t lp_t of an answer, [...] float32 or wider. No gradient passes r."""
    reward = jax.lax.stop_gradient(reduce.masked(token_reward, mask))
    return -beta * jnp.sum(reward * reduce.masked(logprobs, mask), axis=-1)


def token_regularized(margin: Array, preferred: Array, other: Array, *, alpha: Array | float) -> Array:
    """Returns P25, -log sigmoid(m) + alpha sg(sigmoid(-m)) (REG(y_w) + REG(y_l)), of a pair, [...].

    Args:
      margin: [...] float, m = beta * D. preferred, other: [...] float, REG of both answers.

    Source: T-REG, Zhou et al. 2412.02685, where the regularizer fades as a pair is told apart.
    """
    fading = jax.lax.stop_gradient(jax.nn.sigmoid(-margin))
    return jax.nn.softplus(-margin) + alpha * fading * (preferred + other)
