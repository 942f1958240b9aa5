"""Guided roll-in: a guide begins the completion, and the policy continues it (S7).

A prompt's completions share the guide's tokens. They are part of the policy's prompt: scored with the whole text, and
not learned from. The guide is a role of the run that an earlier stage trained. With PPO as objective this is PPO++.

Source: RLGF, 2306.11816, and the code of its authors; there the guide may be a model that only answers. AggreVaTeD,
in which the guide continues the policy's tokens, is `RollOut`.

Rules of length (R6 to R8, DAPO's overlong_buffer, the metrics) count the policy's tokens alone, even if the limit is
Sampler.completion_length, which includes the guide's. Stop strings are refused: one may begin in the guide's tokens.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jrl.rollout.strategies.contract import Fields, Setting, Shard, Strategy, check_no_stop_strings, check_role
from jrl.rollout.strategies.rows import drawn_by_visit, widened
from jrl.types import Array, Finish, PromptBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class RollIn:
    """Completions that a guide begins."""

    guide: str  # the role whose weights begin a completion
    tokens: int  # most tokens that it begins with; how many is drawn from 1 to what it says without its stop token
    probability: float = 1.0  # share of the visits that it begins; part of the compiled program

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"RollIn.tokens must be at least 1; got {self.tokens}")
        if not 0 < self.probability <= 1:
            raise ValueError(f"RollIn.probability must be above 0 and at most 1; got {self.probability}")


def check(config: RollIn, setting: Setting) -> None:
    if config.tokens >= setting.completion_length:
        raise ValueError(
            f"RollIn.tokens = {config.tokens} leaves the policy nothing: the longest completion of the stage has "
            f"{setting.completion_length} tokens, the guide's included"
        )
    check_no_stop_strings(config, setting)
    check_role(config, "guide", setting)


def taken_of_guide(words: Array, chance: Array, place: Array, *, probability: float) -> Array:
    """Returns the number of a guide's tokens that S7 begins with, [B] int32: with `probability` uniform from 1 to
    `words`, else 0.

    Args:
      words: [B] int32, tokens of the guide without its stop token. chance, place: [B] float, uniform in [0, 1).
    """
    count = jnp.minimum(1 + jnp.floor(place * words).astype(jnp.int32), words)
    return jnp.where((words > 0) & (chance < probability), count, 0)


class RollInDrawing(NamedTuple):
    """Roll-in on the device."""

    config: RollIn

    roles = property(lambda self: (self.config.guide,))

    def __call__(self, shard: Shard) -> Fields:
        config, prompts, longest = self.config, shard.prompts, shard.completion_length
        # The index after the last sample of the prompt, so that the keys differ from those of the samples.
        sample = jnp.full_like(prompts.length, shard.samples)
        guided = shard.sample(
            prompts.replace(sample=sample), samples=1, completion_length=config.tokens, role=config.guide
        )
        ended = (guided["finish"] == Finish.STOP_TOKEN).astype(jnp.int32)
        words = guided["length"] - prompts.length - ended
        chance, place = drawn_by_visit(shard)
        num_guided = taken_of_guide(words, chance, place, probability=config.probability)
        with_guide = PromptBatch(tokens=guided["tokens"], length=prompts.length + num_guided, uid=prompts.uid)
        budget = jnp.repeat(longest - num_guided, shard.samples)
        rows = shard.sample(with_guide, budget, samples=shard.samples, completion_length=longest)
        return widened(rows, prompts.tokens.shape[1] + longest, shard.pad_id)


STRATEGY = Strategy(
    config=RollIn,
    check=check,
    drawing=lambda config, tokenizer: RollInDrawing(config),
    roles=lambda config: (config.guide,),
    keeps_routes=True,
)
