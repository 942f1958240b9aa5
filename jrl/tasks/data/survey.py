"""What a run reads of a source before it begins: texts for the tokenizer, and conversations with their answers."""

from __future__ import annotations

from collections.abc import Iterator

from jrl.tasks.data.prompts import Data, is_held_out
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
