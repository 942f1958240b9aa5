"""A small source for tests of data."""

from __future__ import annotations

from jrl.tasks.envs import Generated
from jrl.tasks.example import Example, Message
from jrl.tasks.tokenizers.bytes import Bytes, build

TOKENIZER = build(Bytes(), [])


def numbered(size: int, texts=None, answers=None) -> Generated:
    """Examples "e0", "e1", ... with prompts "q0", "q1", ..., or the given texts and answers."""

    def make(i: int) -> Example:
        text = f"q{i}" if texts is None else texts[i]
        return Example(f"e{i}", (Message("user", text),), answer=str(i) if answers is None else answers[i])

    return Generated(size, make, "fake")
