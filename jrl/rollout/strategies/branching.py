"""Branching at uncertain tokens: some completions of a prompt are sampled, and others continue from within them.

Stage one of CURE (S8): `first` completions are sampled. Each is cut before one of its `candidates` most uncertain
tokens, drawn uniformly, and is continued `continuations` times from there. All first * (1 + continuations) rows are one
group. The tokens that a continuation shares are part of its prompt: the whole text is scored, but only the new tokens
are learned from.

Source: CURE, 2508.11016 and the code of its authors: 4, 3 and 20; stage two is plain sampling.

Rules of length (R6 to R8, DAPO's overlong_buffer, the metrics) count a row's actions, so that a continuation is shorter
to them than the text that is scored. Stop strings are refused: one may begin before the branch.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops.branching import branch_column, most_uncertain
from jrl.ops.keys import row_key, token_key
from jrl.rollout.strategies.contract import Fields, Setting, Shard, Strategy, check_no_stop_strings
from jrl.rollout.strategies.rows import interleaved, widened
from jrl.types import PromptBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branching:
    """Completions that go on from uncertain tokens of others."""

    first: int = 4  # completions of a prompt that are drawn from its end
    continuations: int = 3  # completions that go on from within each of them
    candidates: int = 20  # most uncertain tokens, among which the place is drawn
    min_characters: int = 2  # of the text of a token that may be the place; 1: any token that has a text

    def __post_init__(self) -> None:
        for name in ("first", "continuations", "candidates", "min_characters"):
            if getattr(self, name) < 1:
                raise ValueError(f"Branching.{name} must be at least 1; got {getattr(self, name)}")


def check(config: Branching, setting: Setting) -> None:
    rows = config.first * (1 + config.continuations)
    if setting.samples != rows:
        raise ValueError(
            f"Branching draws first * (1 + continuations) = {config.first} * (1 + {config.continuations}) = {rows} "
            f"completions of a prompt, and Online.samples is {setting.samples}; set it to {rows}"
        )
    check_no_stop_strings(config, setting)


class BranchDrawing(NamedTuple):
    """Branching on the device."""

    config: Branching
    eligible: bytes  # by token id: 1 if a branch may begin at it
    roles: tuple[str, ...] = ()

    def __call__(self, shard: Shard) -> Fields:
        config, prompts, longest = self.config, shard.prompts, shard.completion_length
        width = prompts.tokens.shape[1] + longest
        first = shard.sample(prompts, samples=config.first, completion_length=longest, entropy=True)
        entropy = first.pop("entropy")
        repeated = lambda x: jnp.repeat(x, config.first, axis=0)
        uid, start = repeated(prompts.uid), repeated(prompts.length)

        columns = jnp.arange(width)[None, :]
        allowed = jnp.asarray(np.frombuffer(self.eligible, np.uint8))[first["tokens"]] > 0
        allowed &= first["action_mask"] & (columns > start[:, None])  # to branch at the first token is to sample anew
        # Column 0 is never sampled, so its key is free.
        keys = jax.vmap(lambda uid, sample: token_key(row_key(shard.key, shard.stream, uid, sample), 0))
        noise = jax.vmap(lambda key: jax.random.uniform(key, (width,)))(keys(uid, first["sample"]))
        column = branch_column(most_uncertain(entropy, allowed, count=config.candidates), noise)
        column = jnp.where(column < 0, start, column)

        branches = PromptBatch(
            tokens=first["tokens"],
            length=column,
            uid=uid,
            sample=config.first + config.continuations * first["sample"],
        )
        budget = jnp.repeat(start + longest - column, config.continuations)
        second = shard.sample(branches, budget, samples=config.continuations, completion_length=longest)
        return interleaved([first, widened(second, width, shard.pad_id)], prompts.tokens.shape[0])


def drawing(config: Branching, tokenizer: Any) -> BranchDrawing:
    long_enough = (len(token.decode("utf-8", "replace")) >= config.min_characters for token in tokenizer.token_bytes())
    return BranchDrawing(config, bytes(long_enough))


STRATEGY = Strategy(
    config=Branching,
    check=check,
    drawing=drawing,
    branches=lambda config: (config.first, config.continuations),
    shares_prompt=False,
    keeps_routes=True,
)
