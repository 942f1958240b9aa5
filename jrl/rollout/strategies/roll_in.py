"""Guided roll-in: a guide begins the completion, and the policy goes on from there (S7).

A prompt's completions share the guide's tokens. They are prompt to the policy: scored with the whole text, and not
learned from. The guide is a role of the run, one that an earlier stage trained. With PPO as objective this is PPO++.

Source: RLGF, 2306.11816, and the code of its authors; there the guide may be a model that only answers. AggreVaTeD,
in which the guide goes on from what the policy says, is `RollOut`.

Rules of length (R6 to R8, DAPO's overlong_buffer, the metrics) count the policy's tokens alone, also where a limit is
Sampler.completion_length, which the guide's are part of. Stop strings are refused: one may begin in the guide's tokens.
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
            f"RollIn.tokens = {config.tokens} leaves the policy nothing of Sampler.completion_length = "
            f"{setting.completion_length}, which counts the guide's tokens too"
        )
    check_no_stop_strings(config, setting)
    check_role(config, "guide", setting)


def taken_of_guide(words: Array, chance: Array, place: Array, *, probability: float) -> Array:
    """Returns how many of a guide's tokens S7 begins with, [B] int32: 0, or with `probability` 1 to `words`, uniform.

    Args:
      words: [B] int32, what the guide said without its stop token. chance, place: [B] float, uniform in [0, 1).
    """
    taken = jnp.minimum(1 + jnp.floor(place * words).astype(jnp.int32), words)
    return jnp.where((words > 0) & (chance < probability), taken, 0)


class RollInDrawing(NamedTuple):
    """Roll-in on the device."""

    config: RollIn

    roles = property(lambda self: (self.config.guide,))

    def __call__(self, shard: Shard) -> Fields:
        config, prompts, longest = self.config, shard.prompts, shard.completion_length
        # Beyond the samples of the prompt, so that its noise is not theirs.
        its_sample = jnp.full_like(prompts.length, shard.samples)
        guided = shard.sample(
            prompts.replace(sample=its_sample), samples=1, completion_length=config.tokens, role=config.guide
        )
        ended = (guided["finish"] == Finish.STOP_TOKEN).astype(jnp.int32)
        most = guided["length"] - prompts.length - ended
        chance, place = drawn_by_visit(shard)
        taken = taken_of_guide(most, chance, place, probability=config.probability)
        begun = PromptBatch(tokens=guided["tokens"], length=prompts.length + taken, uid=prompts.uid)
        left = jnp.repeat(longest - taken, shard.samples)
        rows = shard.sample(begun, left, samples=shard.samples, completion_length=longest)
        return widened(rows, prompts.tokens.shape[1] + longest, shard.pad_id)


STRATEGY = Strategy(
    config=RollIn,
    check=check,
    drawing=lambda config, tokenizer: RollInDrawing(config),
    roles=lambda config: (config.guide,),
)
