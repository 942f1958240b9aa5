"""The byte tokenizer: id = byte, control ids above. Nothing to train, nothing to download. No JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from jrl import paths
from jrl.tasks.tokenizers.contract import CONTROL_NAMES, SAVED_AS, Controlled, Controls, layout_bytes, padded_size, utf8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bytes:
    """Ids 0..255 are the bytes of UTF-8. It has no options."""


@dataclasses.dataclass(frozen=True)
class ByteTokenizer(Controlled):
    """See jrl.tasks.tokenizers.contract for the members."""

    controls: Controls = dataclasses.field(default_factory=lambda: Controls.at(256))
    vocab_size: int = padded_size(256 + len(CONTROL_NAMES))
    filled: int = 256 + len(CONTROL_NAMES)
    leads: bool = False

    def encode(self, text: str) -> list[int]:
        return list(utf8(text))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if 0 <= i < 256).decode("utf-8", "replace")

    def token_bytes(self) -> list[bytes]:
        return [bytes([i]) if i < 256 else b"" for i in range(self.vocab_size)]

    def save(self, folder: Path | str) -> None:
        paths.write_bytes_atomic(paths.local(folder) / SAVED_AS, layout_bytes(self._layout()))

    def _layout(self) -> dict:
        return {"kind": "Bytes", "vocab_size": self.vocab_size, "controls": dataclasses.asdict(self.controls)}


def build(config: Bytes, texts: Iterable[str]) -> ByteTokenizer:
    """Returns the byte tokenizer. `texts` are not read."""
    del config, texts
    return ByteTokenizer()


def load(folder: Path, layout: dict) -> ByteTokenizer:
    """Returns the tokenizer saved in `folder`. Raises ValueError if it was saved with another id layout."""
    tokenizer = ByteTokenizer()
    if layout != tokenizer._layout():
        raise ValueError(f"{folder / SAVED_AS}: laid out as {layout}, this version has {tokenizer._layout()}")
    return tokenizer
