"""Tokenizers: text to ids and back. `TOKENIZERS` is the table; jrl.tokenizers.contract says what a tokenizer is."""

from __future__ import annotations

from jrl.tokenizers import bytes as _bytes
from jrl.tokenizers.contract import Tokenizer

TOKENIZERS: dict[str, Tokenizer] = {
    "Bytes": Tokenizer(_bytes.Bytes, _bytes.build),
}
