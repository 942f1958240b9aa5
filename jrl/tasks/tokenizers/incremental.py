"""Text out of tokens as they come, never half a character. No JAX."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from jrl.tasks.tokenizers.contract import without_lead


class IncrementalDecoder:
    """Holds back the bytes of a character until its last one is there. The texts returned, joined, are
    `tokenizer.decode` of all ids; without `close` they end where the last whole character does."""

    def __init__(self, token_bytes: Sequence[bytes], leads: bool):
        """`token_bytes` and `leads` are the tokenizer's: see jrl.tasks.tokenizers.contract."""
        self._pieces = token_bytes
        self._leads = leads  # the blank in front has not been met yet
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """Returns the text that `ids` complete; "" where they end inside its first character."""
        return self._without_lead(
            self._utf8.decode(b"".join(self._pieces[i] for i in ids if 0 <= i < len(self._pieces)))
        )

    def close(self) -> str:
        """Returns what was held back, as U+FFFD: no more ids will come."""
        return self._without_lead(self._utf8.decode(b"", final=True))

    def _without_lead(self, text: str) -> str:
        if text and self._leads:
            self._leads = False
            return without_lead(text, True)
        return text
