"""A policy as a folder that other tools load: what `jrl export` does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from jrl.checkpoints.published import Published, companions_of, decoder_of, export
from jrl.policy import NoTokenizer, open_trained
from jrl.tokenizers.published import PublishedTokenizer

SIZES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}


def export_policy(
    source: str | Path,
    to: str | Path,
    step: int | None = None,
    *,
    dtype: str = "float32",
    max_shard: str = "5GB",
    announce: Callable[[int, int], None] | None = None,
) -> tuple[int, list[str]]:
    """Writes the policy of a run, or of a published folder, to a new folder. Returns (its step, the files written).

    The family is the published model's own, or else the first that can say the decoder. The tokenizer's files go along
    where they are published ones; one that the run trained itself has no such form, and stays in the run.

    Args:
      to: a folder that is not there yet, or empty.
      dtype: of the tensors, "float32" or "bfloat16".
      max_shard: of one file of tensors, such as "5GB" or "500MB".
      announce: told (bytes read, bytes there are) while a published folder is read.

    Raises: ValueError for a source, a step, a size or a decoder that cannot be exported.
    """
    most_bytes = size_of(max_shard)
    trained = open_trained(source, (), step, announce=announce)
    model = trained.policy.config.model
    family = decoder_of(model)[0] if isinstance(model, Published) else None
    tokenizer, companions = trained.policy.tokenizer, {}
    if isinstance(tokenizer, PublishedTokenizer):
        companions = {name: data for name, data in tokenizer.files.items() if name != "config.json"}
    elif isinstance(tokenizer, NoTokenizer) and isinstance(model, Published):
        companions = companions_of(model.path)
    files = export(
        trained.params,
        trained.policy.cfg,
        to,
        dtype=dtype,
        most_bytes=most_bytes,
        family=family,
        companions=companions,
    )
    return trained.step, files


def size_of(text: str) -> int:
    """Returns bytes of "5GB", "500MB", "20KB" or "1000"."""
    found = re.fullmatch(r"\s*(\d+)\s*(KB|MB|GB|B)?\s*", text, re.IGNORECASE)
    if found is None or int(found[1]) < 1:
        raise ValueError(f"--max-shard-size is {text!r}; give a size such as 5GB or 500MB")
    return int(found[1]) * SIZES[(found[2] or "B").upper()]
