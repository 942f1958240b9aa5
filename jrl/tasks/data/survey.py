"""Statistics of a source before a run: texts for the tokenizer, lengths, duplicates, rows that would be dropped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jrl.tasks.data.prompts import Data, encode_prompt, is_held_out
from jrl.tasks.envs.contract import Source
from jrl.tasks.example import Message
from jrl.tasks.stopping import Stop, check_stop, never


def texts_of(source: Source, config: Data, most: int = 20_000, stop: Stop = never) -> Iterator[str]:
    """Yields texts of the training split, each message and then the answer: what tokenizers are trained from.
    At most `most` examples are looked at, spread evenly over the source.

    Raises: StopRequested where `stop` says so.
    """
    looked_at = min(len(source), most)
    for i in range(looked_at):
        check_stop(stop, "reading texts for the tokenizer")
        example = source[i * len(source) // looked_at]
        if is_held_out(example, config):
            continue
        for message in example.messages:
            yield message.content
        if example.answer is not None:
            yield example.answer


def answered_conversations(source: Source, config: Data, most: int) -> list[list[Message]]:
    """Returns the first `most` training examples that have an answer, as conversations that end with it."""
    found: list[list[Message]] = []
    for index in range(len(source)):
        if len(found) == most:
            break
        example = source[index]
        if example.answer is not None and not is_held_out(example, config):
            found.append([*example.messages, Message("assistant", example.answer)])
    return found


def survey(source: Source, tokenizer: Any, config: Data, n: int) -> dict[str, int]:
    """Returns what the first `n` examples (or all, where there are fewer) are like.

    Returns: counts "examined", "held_out", "duplicate_prompt" (a text met before), "no_answer", "empty", "too_long",
        and "longest_prompt", "longest_answer" in tokens.
    """
    counts = dict.fromkeys(
        ("examined", "held_out", "duplicate_prompt", "no_answer", "empty", "too_long", "longest_prompt",
         "longest_answer"), 0)  # fmt: skip
    seen: set[bytes] = set()
    for index in range(min(n, len(source))):
        example = source[index]
        digest = example.prompt_digest()
        prompt, cause = encode_prompt(example, tokenizer, config)
        counts["examined"] += 1
        counts["held_out"] += is_held_out(example, config)
        counts["duplicate_prompt"] += digest in seen
        seen.add(digest)
        if cause is not None:
            counts[cause] += 1
        counts["longest_prompt"] = max(counts["longest_prompt"], len(prompt))
        if example.answer is None:
            counts["no_answer"] += 1
        else:
            counts["longest_answer"] = max(counts["longest_answer"], len(tokenizer.encode(example.answer)))
    return counts
