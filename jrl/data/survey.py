"""A look at a source before a run: texts for the tokenizer, lengths, duplicates, what would be dropped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jrl.data.prompts import Data, encode_prompt, is_held_out
from jrl.envs.contract import Source


def texts_of(source: Source, config: Data) -> Iterator[str]:
    """Yields the texts of the training split in order of index, each example's messages and then its answer: what a
    tokenizer is trained from."""
    for index in range(len(source)):
        example = source[index]
        if is_held_out(example, config):
            continue
        for message in example.messages:
            yield message.content
        if example.answer is not None:
            yield example.answer


def survey(source: Source, tokenizer: Any, config: Data, n: int) -> dict[str, int]:
    """Returns what the first `n` examples (or all, where there are fewer) are like.

    Returns: counts "examined", "held_out", "duplicate_prompt" (a text met before), "no_answer", "empty", "too_long",
        and "longest_prompt", "longest_answer" in tokens.
    """
    found = dict.fromkeys(
        ("examined", "held_out", "duplicate_prompt", "no_answer", "empty", "too_long", "longest_prompt",
         "longest_answer"), 0)  # fmt: skip
    seen: set[bytes] = set()
    for index in range(min(n, len(source))):
        example = source[index]
        digest = example.prompt_digest()
        prompt, cause = encode_prompt(example, tokenizer, config)
        found["examined"] += 1
        found["held_out"] += is_held_out(example, config)
        found["duplicate_prompt"] += digest in seen
        seen.add(digest)
        if cause is not None:
            found[cause] += 1
        found["longest_prompt"] = max(found["longest_prompt"], len(prompt))
        if example.answer is None:
            found["no_answer"] += 1
        else:
            found["longest_answer"] = max(found["longest_answer"], len(tokenizer.encode(example.answer)))
    return found
