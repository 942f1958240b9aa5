"""The tokenizer of a published folder, whether in a published form or in jrl's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jrl import paths
from jrl.models.pretrained.published import OWN_TOKENIZER
from jrl.tasks.tokenizers import TOKENIZERS
from jrl.tasks.tokenizers import load as load_tokenizer
from jrl.tasks.tokenizers.published import VOCABULARIES, HuggingFace, build


def published_tokenizer(
    folder: Path, table: Mapping[str, Any] = TOKENIZERS, chosen: HuggingFace | None = None
) -> Any | None:
    """Returns the tokenizer of a published folder, or the one that jrl exported into it; None if it has neither.

    Args:
      table: the kinds that an exported one may have. chosen: how to open a published one; None: by its files alone.
    """
    if any(paths.exists(folder / name) for name in VOCABULARIES):
        return build(HuggingFace(path=str(folder)) if chosen is None else chosen, ())
    if paths.exists(folder / OWN_TOKENIZER):
        return load_tokenizer(folder / OWN_TOKENIZER, table)
    return None
