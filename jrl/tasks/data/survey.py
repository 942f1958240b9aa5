"""What a run reads from a source before it starts: texts for the tokenizer, and conversations with their answers."""

from __future__ import annotations

from collections.abc import Iterator

from jrl.tasks.data.prompts import Data, is_held_out
from jrl.tasks.envs.contract import Source
from jrl.tasks.example import Message
from jrl.tasks.stopping import Stop, check_stop, never

TOKENIZER_TEXTS = 4096  # most examples that a tokenizer is trained on


def texts_of(source: Source, config: Data, most: int = TOKENIZER_TEXTS, stop: Stop = never) -> Iterator[str]:
    """Yields texts of the training split, each message and then the answer, to train a tokenizer on. Reads at most
    `most` examples, spread evenly over the source.

    Raises: StopRequested if `stop` returns True.
    """
    count = min(len(source), most)
    for i in range(count):
        check_stop(stop, "reading texts for the tokenizer")
        example = source[i * len(source) // count]
        if is_held_out(example, config):
            continue
        for message in example.messages:
            yield message.content
        if example.answer is not None:
            yield example.answer


def answered_conversations(source: Source, config: Data, most: int) -> list[list[Message]]:
    """Returns the first `most` training examples that have an answer, as conversations that end with it."""
    conversations: list[list[Message]] = []
    for index in range(len(source)):
        if len(conversations) == most:
            break
        example = source[index]
        if example.answer is not None and not is_held_out(example, config):
            conversations.append([*example.messages, Message("assistant", example.answer)])
    return conversations
