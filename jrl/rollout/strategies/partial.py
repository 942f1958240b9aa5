"""Partial rollouts: long completions are sampled in segments, one per step, each with the weights of its step (S5).

A completion of the maximum length has K segments. The batch that update t learns from was started K - 1 steps before;
its segment i was sampled with version max(0, t - (K - 1) + i), by index and not by arrival. A completion that has ended
waits for its batch. So only the last segment is on-policy, and a step decodes at most `tokens` tokens in sequence,
however long completions get.

Source: Kimi k1.5, 2501.12599 section 2.6.2. There a row is learned from as soon as it has ended.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jrl.rollout.strategies.contract import Fields, Setting, Shard, Strategy, check_no_stop_strings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partial:
    """Completions that are drawn over several steps."""

    tokens: int  # most tokens of a completion that a step draws; a quarter of the longest is usual
    newest_only: bool = False  # tokens of older weights do not enter the loss, in the place of importance weights

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"Partial.tokens must be at least 1; got {self.tokens}")


def num_segments(config: object, completion_length: int) -> int:
    """Returns K, the number of steps in which the longest completion is sampled."""
    return -(-completion_length // config.tokens) if isinstance(config, Partial) else 1


def tokens_before_last(completion_length: int, tokens: int) -> int:
    """Returns the most tokens that a completion has before its last segment of `tokens` is sampled."""
    return (completion_length - 1) // tokens * tokens


def check(config: Partial, setting: Setting) -> None:
    if config.tokens >= setting.completion_length:
        raise ValueError(
            f"Partial.tokens = {config.tokens} draws every completion at once: the longest one of the stage has "
            f"{setting.completion_length} tokens. A quarter of that is usual"
        )
    check_no_stop_strings(config, setting)


class FirstSegment(NamedTuple):
    """The first segment of every completion, on the device; `jrl.rollout.segments` samples the others."""

    tokens: int
    roles: tuple[str, ...] = ()

    def __call__(self, shard: Shard) -> Fields:
        budget = jnp.full(shard.prompts.tokens.shape[0] * shard.samples, self.tokens, jnp.int32)
        return shard.sample(shard.prompts, budget, samples=shard.samples, completion_length=shard.completion_length)


STRATEGY = Strategy(
    config=Partial, check=check, drawing=lambda config, tokenizer: FirstSegment(config.tokens), keeps_routes=True
)
