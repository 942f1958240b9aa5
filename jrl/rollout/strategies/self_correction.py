"""Two attempts at a prompt: an answer, an instruction to check it, and another answer (S17).

The instruction does not depend on the first answer. Both attempts are actions, of turns 0 and 1; the instruction is
not. They are scored separately: the second's reward is the row's, and the first's is the component `first_attempt`. A
first attempt that reaches its length limit has no second.

Source: SCoRe, 2409.12917 section 4.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from jrl.rollout.strategies.contract import Fields, Setting, Shard, Strategy
from jrl.rollout.strategies.rows import appended, second_turn, widened
from jrl.tasks.example import Message
from jrl.types import Finish, PromptBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfCorrection:
    """Two attempts, with an instruction between them."""

    # What the user says after the first attempt. It must not say whether that was right.
    instruction: str = (
        "There might be an error in the solution above. Please correct it, if there is one, and write down the final "
        "answer again."
    )

    def __post_init__(self) -> None:
        if not self.instruction.strip():
            raise ValueError("SelfCorrection.instruction is empty: without it a second attempt has no turn of its own")


def check(config: SelfCorrection, setting: Setting) -> None:
    if setting.stop_strings:
        raise ValueError(
            f"SelfCorrection needs attempts that end with the stop token, and Sampler.stop_strings = "
            f"{setting.stop_strings!r} ends them without; leave them out"
        )


def between(tokenizer: Any, instruction: str) -> tuple[int, ...]:
    """Returns the tokens between two attempts: the user's turn with the instruction, and the start of the next answer.

    They are the common suffix of two conversations that differ in the first answer, without the stop token, which the
    policy samples, and without blanks that the template writes before it.
    """
    conversation = lambda answer: tokenizer.encode_prompt(
        [Message("user", "?"), Message("assistant", answer), Message("user", instruction)]
    )
    first, second = conversation("a"), conversation("b")
    common = next(i for i, (x, y) in enumerate(zip(reversed(first), reversed(second))) if x != y)
    ids = first[len(first) - common :]
    pieces = tokenizer.token_bytes()
    blanks = next(i for i, token in enumerate(ids) if not pieces[token].isspace())
    return tuple(ids[blanks + 1 :] if ids[blanks] in tokenizer.end_ids else ids)


class AttemptDrawing(NamedTuple):
    """Two attempts on the device."""

    instruction: tuple[int, ...]
    roles: tuple[str, ...] = ()

    def __call__(self, shard: Shard) -> Fields:
        prompts, longest = shard.prompts, (shard.completion_length - len(self.instruction)) // 2
        if longest < 1:
            raise ValueError(
                f"SelfCorrection: the instruction has {len(self.instruction)} tokens with its turn, and the longest "
                f"completion of the stage, {shard.completion_length} tokens, must hold it and two attempts"
            )
        width = prompts.tokens.shape[1] + shard.completion_length
        first = shard.sample(prompts, samples=shard.samples, completion_length=longest)
        more = jnp.asarray(self.instruction, jnp.int32)
        tokens, length = appended(first["tokens"], first["length"], more, shard.pad_id)
        answered = first["finish"] == Finish.STOP_TOKEN
        repeated = lambda x: jnp.repeat(x, shard.samples, axis=0)
        again = PromptBatch(
            tokens=tokens, length=jnp.where(answered, length, 0), uid=repeated(prompts.uid), sample=first["sample"]
        )
        second = shard.sample(again, samples=1, completion_length=longest)
        first, second = (widened(fields, width, shard.pad_id) for fields in (first, second))
        return {**second_turn(first, second), "group": first["group"], "sample": first["sample"]}


STRATEGY = Strategy(
    config=SelfCorrection,
    check=check,
    drawing=lambda config, tokenizer: AttemptDrawing(between(tokenizer, config.instruction)),
    attempts=2,
    keeps_routes=True,
)
