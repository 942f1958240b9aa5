"""Tokenizers: text to ids and back. `TOKENIZERS` is the table; `contract` defines a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jrl import paths
from jrl.tasks.tokenizers import bytes as _bytes
from jrl.tasks.tokenizers import pieces as _pieces
from jrl.tasks.tokenizers import published as _published
from jrl.tasks.tokenizers.contract import SAVED_AS, Tokenizer

TOKENIZERS: dict[str, Tokenizer] = {
    "Bytes": Tokenizer(_bytes.Bytes, _bytes.build, _bytes.load),
    "SentencePiece": Tokenizer(_pieces.SentencePiece, _pieces.build, _pieces.load),
    "HuggingFace": Tokenizer(_published.HuggingFace, _published.build, _published.load),
}


def load(folder: Path | str, table: dict[str, Tokenizer] = TOKENIZERS) -> Any:
    """Returns the tokenizer that `tokenizer.save(folder)` wrote.

    Raises: ValueError if there is none, its kind is not in `table`, or its files do not match.
    """
    saved = paths.local(folder) / SAVED_AS
    try:
        layout = json.loads(paths.read_bytes(saved))
        kind = layout["kind"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{saved} is not a saved tokenizer: {error}") from error
    if kind not in table:
        raise ValueError(f"Unknown tokenizer {kind!r} in {saved}. Available: {', '.join(table)}")
    return table[kind].load(saved.parent, layout)
