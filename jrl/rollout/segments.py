"""Samples completions in segments, each with newer weights."""

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
    """Returns S5's rows with up to `tokens` more tokens; rows that have ended are unchanged.

    A token's random key depends on its column, so segments sampled with the same weights equal one call's completion.

    Args:
      rollout: rows [N, P + C] with one or more segments of `tokens` each. uid: [N, 2] uint32, of their visits.
      version: [] int32, of `params`. options: of whole completions, C = completion_length.
    """
    completion_length = options.completion_length
    drawn = rollout.action_mask.sum(axis=-1, dtype=jnp.int32)
    goes_on = (rollout.finish == jnp.int8(Finish.LENGTH)) & (drawn > 0) & (drawn < completion_length)
    width = rollout.tokens.shape[1]
    prompt_width = width - completion_length + tokens_before_last(completion_length, tokens)
    prompts = PromptBatch(rollout.tokens[:, :prompt_width], jnp.where(goes_on, rollout.length, 0), uid, rollout.sample)
    budget = jnp.minimum(tokens, completion_length - drawn)
    options = options._replace(samples=1, completion_length=tokens)
    more = sampler.program(params, prompts, key, stream, version, sampling_params, None, budget, options=options)
    first, second = vars(rollout), widened(vars(more), width, options.pad_id)
    return rollout.replace(**{**continued(first, second), "weights_fingerprint": more.weights_fingerprint})
