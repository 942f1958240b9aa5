"""Draws completions in segments, each by other weights."""

from __future__ import annotations

import jax.numpy as jnp

from jrl.rollout import sampler
from jrl.rollout.sampler import Options, SamplingParams
from jrl.rollout.strategies.partial import tokens_before_last
from jrl.rollout.strategies.rows import continued, widened
from jrl.types import Array, Finish, PromptBatch, PyTree, Rollout


def next_segment(
    params: PyTree,
    rollout: Rollout,
    uid: Array,
    key: Array,
    stream: Array,
    version: Array,
    sampling_params: SamplingParams,
    *,
    tokens: int,
    options: Options,
) -> Rollout:
    """Returns S5's rows with up to `tokens` more tokens; those that have ended are as they were.

    A token has the noise of its place, so that segments of the same weights are together what one call draws.

    Args:
      rollout: rows [N, P + C], of which each has drawn one or more segments of `tokens`. uid: [N, 2] uint32, of their
        visits.
      version: [] int32, of `params`. options: of whole completions, C = completion_length.
    """
    completion_length = options.completion_length
    drawn = rollout.action_mask.sum(axis=-1, dtype=jnp.int32)
    goes_on = (rollout.finish == jnp.int8(Finish.LENGTH)) & (drawn > 0) & (drawn < completion_length)
    width = rollout.tokens.shape[1]
    begun = width - completion_length + tokens_before_last(completion_length, tokens)
    prompts = PromptBatch(rollout.tokens[:, :begun], jnp.where(goes_on, rollout.length, 0), uid, rollout.sample)
    left = jnp.minimum(tokens, completion_length - drawn)
    options = options._replace(samples=1, completion_length=tokens)
    more = sampler.program(params, prompts, key, stream, version, sampling_params, None, left, options=options)
    first, second = vars(rollout), widened(vars(more), width, options.pad_id)
    return rollout.replace(**{**continued(first, second), "weights_fingerprint": more.weights_fingerprint})
