"""Incremental decoding of tokens to text, in whole characters. No JAX."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from jrl.tasks.tokenizers.contract import without_lead


class IncrementalDecoder:
    """Buffers the bytes of a character until it is complete. The returned texts, joined, are `tokenizer.decode` of all
    ids; without `close` they end at the last complete character."""

    def __init__(self, token_bytes: Sequence[bytes], leads: bool):
        """Args: token_bytes, leads: of the tokenizer, see jrl.tasks.tokenizers.contract."""
        self._pieces = token_bytes
        self._leads = leads  # the leading space has not been removed yet
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """Returns the text that `ids` complete; "" if they complete no character."""
        return self._without_lead(
            self._utf8.decode(b"".join(self._pieces[i] for i in ids if 0 <= i < len(self._pieces)))
        )

    def close(self) -> str:
        """Returns the incomplete character in the buffer as U+FFFD. Call it after the last ids."""
        return self._without_lead(self._utf8.decode(b"", final=True))

    def _without_lead(self, text: str) -> str:
        if text and self._leads:
            self._leads = False
            return without_lead(text, True)
        return text
