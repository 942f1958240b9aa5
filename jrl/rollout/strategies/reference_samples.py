"""Half of a prompt's completions are sampled from the reference, to be compared with the policy's and learned from.

Unlike those of an opponent (MixtureOpponent) their tokens are actions: both answers of a pair have log-probs under the
policy. They are the last of a prompt's samples.

Source: XPO 2405.21046 draws one answer from each.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jrl.rollout.strategies.contract import Fields, Setting, Shard, Strategy
from jrl.rollout.strategies.opponent import REFERENCE
from jrl.rollout.strategies.rows import interleaved


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceSamples:
    """Half of a prompt's completions are the reference's, the last ones."""


def check(config: ReferenceSamples, setting: Setting) -> None:
    if setting.samples % 2:
        raise ValueError(
            f"ReferenceSamples draws half of the completions of a prompt from the reference, and Online.samples = "
            f"{setting.samples} has no half; 2 is usual"
        )
    if REFERENCE not in setting.roles:
        raise ValueError("ReferenceSamples draws from the reference, and this objective has none; use XPO or OnlineVPO")


class ReferenceDrawing(NamedTuple):
    """Samples of policy and reference on the device."""

    roles: tuple[str, ...] = (REFERENCE,)

    def __call__(self, shard: Shard) -> Fields:
        half = shard.samples // 2
        prompts, longest = shard.prompts, shard.completion_length
        policy = shard.sample(prompts, samples=half, completion_length=longest)
        last_half = prompts.replace(sample=jnp.full_like(prompts.length, half))
        reference = shard.sample(last_half, samples=half, completion_length=longest, role=REFERENCE)
        return interleaved([policy, reference], prompts.length.shape[0])


STRATEGY = Strategy(
    config=ReferenceSamples,
    check=check,
    drawing=lambda config, tokenizer: ReferenceDrawing(),
    roles=lambda config: (REFERENCE,),
)
