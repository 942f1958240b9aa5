"""Opponents: some of a prompt's completions are sampled from a mixture of the policy and the reference (S14).

They are scored like the others, and the policy's completions are compared with them. They hold no actions, so that
nothing is learned from their tokens.

Source: Nash-MD, 2312.00886, whose opponent is the geometric mixture, and TRL.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jrl.rollout.strategies.contract import Fields, Setting, Shard, Strategy
from jrl.rollout.strategies.rows import EMPTY, interleaved

REFERENCE = "reference"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureOpponent:
    """Completions of a mixture of policy and reference, beside the policy's."""

    opponents: int = 1  # of a prompt's completions, the last ones
    weight: float = 0.5  # of the reference's logits; 0: the policy plays itself, 1: the reference. Compiled in

    def __post_init__(self) -> None:
        if self.opponents < 1:
            raise ValueError(f"MixtureOpponent.opponents must be at least 1; got {self.opponents}")
        if not 0 <= self.weight <= 1:
            raise ValueError(f"MixtureOpponent.weight must be 0 to 1; got {self.weight}")


def check(config: MixtureOpponent, setting: Setting) -> None:
    if config.opponents >= setting.samples:
        raise ValueError(
            f"MixtureOpponent.opponents = {config.opponents} of Online.samples = {setting.samples} completions leaves "
            "the policy none of its own; 1 of 2 is usual"
        )
    if REFERENCE not in setting.roles:
        raise ValueError("MixtureOpponent mixes the policy with the reference, and this objective has none; use "
                         "NashMD, or an objective with a KL to the reference")  # fmt: skip


class OpponentDrawing(NamedTuple):
    """Opponents on the device."""

    config: MixtureOpponent
    roles: tuple[str, ...] = (REFERENCE,)

    def __call__(self, shard: Shard) -> Fields:
        opponents, prompts = self.config.opponents, shard.prompts
        num_policy = shard.samples - opponents
        policy = shard.sample(prompts, samples=num_policy, completion_length=shard.completion_length)
        mixed = shard.sample(
            prompts.replace(sample=jnp.full_like(prompts.length, num_policy)),
            samples=opponents,
            completion_length=shard.completion_length,
            mixed_with=(REFERENCE, self.config.weight),
        )
        blank = {name: None if mixed[name] is None else jnp.full_like(mixed[name], EMPTY[name]) for name in EMPTY}
        opponent = {**mixed, **blank, "turn": jnp.full_like(mixed["turn"], -1)}
        return interleaved([policy, opponent], prompts.length.shape[0])


STRATEGY = Strategy(
    config=MixtureOpponent,
    check=check,
    drawing=lambda config, tokenizer: OpponentDrawing(config),
    roles=lambda config: (REFERENCE,),
    shares_prompt=False,
)
