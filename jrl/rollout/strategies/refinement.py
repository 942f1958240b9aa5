"""Refinements: answers that a role samples given feedback, and the policy learns given the prompt alone (P34's ILF).

An example has an answer and feedback on it. Completions are sampled from a prompt that contains both, by a role that
was trained on Demonstrations with the same `condition`. The rows that are scored and learned from hold the example's
prompt instead. So the sampler's log-probs are of another model and prompt than the learner's: an objective that
imitates does not read them, and others correct by importance weights; the metrics mismatch/ show the distance. If an
example lacks a text, or its conditioned prompt has more than Data.prompt_length tokens, its rows have no action and
count as aborted.

Source: Scheurer et al. 2303.16755, which imitates, of several refinements, the one most similar to the feedback.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jrl.rollout.strategies.contract import Fields, Setting, Shard, Strategy, check_role
from jrl.rollout.strategies.rows import after_prompts
from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stored import LeftOut, Template, with_system


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refinement:
    """Completions that refine an answer of the data by feedback of the data."""

    refiner: str = "refiner"  # the role whose weights draw them
    # what the system message says while they are drawn, or adds to the prompt's own: texts or numbers of Example.info
    # by name
    condition: str = "Answer: {given}\nFeedback: {feedback}\n"

    def __post_init__(self) -> None:
        Template(self.condition, "Refinement.condition")


def check(config: Refinement, setting: Setting) -> None:
    check_role(config, "refiner", setting)


def check_prompts(config: Refinement, visits: Sequence[Visit]) -> None:
    Template(config.condition, "Refinement.condition").check_some(visits, numbers=True)


def asked(config: Refinement, visit: Visit, tokenizer: Any, room: int) -> tuple[int, ...]:
    """Returns P34's prompt of ILF, with answer and feedback; () if the example lacks one, or it exceeds `room`."""
    try:
        goal = Template(config.condition, "Refinement.condition").fill(visit, numbers=True)
    except LeftOut:
        return ()
    prompt = tuple(tokenizer.encode_prompt(with_system(visit.example.messages, goal)))
    return prompt if len(prompt) <= room else ()


class RefinementDrawing(NamedTuple):
    """Completions of the conditioned prompt, in rows that hold the example's."""

    refiner: str

    roles = property(lambda self: (self.refiner,))

    def __call__(self, shard: Shard) -> Fields:
        prompts, repeated = shard.prompts, lambda x: jnp.repeat(x, shard.samples, axis=0)
        fields = shard.sample(
            prompts, samples=shard.samples, completion_length=shard.completion_length, role=self.refiner
        )
        tokens, length = repeated(prompts.row_tokens), repeated(prompts.row_length)
        return after_prompts(fields, repeated(prompts.length), tokens, length, pad_id=shard.pad_id)


STRATEGY = Strategy(
    config=Refinement,
    check=check,
    check_prompts=check_prompts,
    drawing=lambda config, tokenizer: RefinementDrawing(config.refiner),
    asked=asked,
    roles=lambda config: (config.refiner,),
)
