"""Guided roll-out: the policy begins a completion and samples a token, and a guide completes it (S7).

For every prompt the policy rolls in once, up to a uniformly drawn token. From there each row samples `tokens` tokens of
the policy, which are its only actions, and the guide's continuation of them decides the reward. A group's mean is then
the value of the state if the guide continues the policy's token, and a row's advantage is that of its token:

    A = Q^guide(s, a) - mean over the group's tokens of Q^guide(s, .)

This is AggreVaTeD, with one roll-out per token instead of a critic. With `RollOut.probability` below 1 the policy
completes the other visits itself, and A uses its own Q there: LOLS. D2LOLS is two stages, this strategy and then
RollIn. The guide is a role of the run that an earlier stage trained.

Source: RLGF, 2306.11816, and the code of its authors, whose baseline is the guide's value, V^guide(s): the gradient is
the same in expectation, since a baseline that depends only on the state does not change it.

Rules of length (R6 to R8, DAPO's overlong_buffer, the metrics) count actions alone, at most `tokens`, and not the
guide's tokens. Stop strings are refused: one may begin in the roll-in, or in the policy's tokens.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jrl.rollout.strategies.contract import Fields, Setting, Shard, Strategy, check_no_stop_strings, check_role
from jrl.rollout.strategies.rows import EMPTY, continued, drawn_by_visit, widened
from jrl.types import Array, Finish, PromptBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class RollOut:
    """Completions that a guide ends."""

    guide: str  # the role whose weights end a completion
    tokens: int = 1  # tokens of the policy between its roll-in and the guide's words: what is learned from
    probability: float = 1.0  # share of the visits that the guide ends; part of the compiled program

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"RollOut.tokens must be at least 1; got {self.tokens}")
        if not 0 < self.probability <= 1:
            raise ValueError(f"RollOut.probability must be above 0 and at most 1; got {self.probability}. Where the "
                             "guide ends no completion, leave Online.strategy out")  # fmt: skip


def check(config: RollOut, setting: Setting) -> None:
    if config.tokens >= setting.completion_length:
        raise ValueError(
            f"RollOut.tokens = {config.tokens} leaves the guide nothing: the longest completion of the stage has "
            f"{setting.completion_length} tokens"
        )
    if setting.samples < 2:
        raise ValueError("RollOut compares tokens that are drawn after the same ones, and Online.samples = 1 draws "
                         "one; 8 is usual")  # fmt: skip
    check_no_stop_strings(config, setting)
    check_role(config, "guide", setting)


def rolled_in(words: Array, place: Array, chance: Array, *, probability: float) -> tuple[Array, Array]:
    """Returns the number of tokens that S7 keeps of a roll-in, [B] int32, and whether the guide completes it, [B] bool.

    The number is uniform from 0 to `words` - 1, so that every token of the roll-in may be the one that is sampled
    again; it is 0 for an empty roll-in. The guide completes it with `probability`, else the policy does.

    Args:
      words: [B] int32, tokens of the roll-in with its stop token. place, chance: [B] float, uniform in [0, 1).
    """
    kept = jnp.clip(jnp.floor(place * words).astype(jnp.int32), 0, jnp.maximum(words - 1, 0))
    return kept, chance < probability


class RollOutDrawing(NamedTuple):
    """Roll-out on the device."""

    config: RollOut

    roles = property(lambda self: (self.config.guide,))

    def __call__(self, shard: Shard) -> Fields:
        config, prompts, longest = self.config, shard.prompts, shard.completion_length
        width = prompts.tokens.shape[1] + longest
        # The index after the last sample of the prompt, so that the keys differ from those of the samples.
        sample = jnp.full_like(prompts.length, shard.samples)
        roll_in = shard.sample(prompts.replace(sample=sample), samples=1, completion_length=longest)
        place, chance = drawn_by_visit(shard)
        words = roll_in["length"] - prompts.length
        kept, guided = rolled_in(words, place, chance, probability=config.probability)
        with_roll_in = PromptBatch(tokens=roll_in["tokens"], length=prompts.length + kept, uid=prompts.uid)
        repeated = lambda x: jnp.repeat(x, shard.samples, axis=0)
        left = repeated(longest - kept)
        policy_tokens = shard.sample(with_roll_in, left, samples=shard.samples, completion_length=config.tokens)
        first = widened(policy_tokens, width, shard.pad_id)
        goes_on = first["finish"] == jnp.int8(Finish.LENGTH)
        actions = first["action_mask"]
        budget = left - actions.sum(-1, dtype=left.dtype)
        rows, ended_by = first, [(config.guide, goes_on & repeated(guided))]
        if config.probability < 1:
            ended_by.append(("policy", goes_on & ~repeated(guided)))
        for role, ends in ended_by:
            after = PromptBatch(
                tokens=first["tokens"],
                length=jnp.where(ends, first["length"], 0),
                uid=repeated(prompts.uid),
                sample=first["sample"],
            )
            second = shard.sample(after, budget, samples=1, completion_length=longest, role=role)
            rows = continued(rows, widened(second, width, shard.pad_id))
        by_policy = {
            name: None if rows[name] is None else jnp.where(actions, rows[name], jnp.full_like(rows[name], empty))
            for name, empty in EMPTY.items()
        }
        return {**rows, **by_policy, "group": first["group"], "sample": first["sample"]}


STRATEGY = Strategy(
    config=RollOut,
    check=check,
    drawing=lambda config, tokenizer: RollOutDrawing(config),
    roles=lambda config: (config.guide,),
)
