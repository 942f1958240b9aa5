"""Visits as the arrays that the sampler takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jrl.tasks.data.prompts import Visit
from jrl.types import PromptBatch


def prompt_batch(visits: Sequence[Visit], *, prompt_length: int, pad_id: int) -> PromptBatch:
    """Returns the prompts as host arrays: tokens [B, P] int32 padded on the right, length [B] int32, uid [B, 2] uint32.

    Raises: ValueError for a prompt that is empty or longer than `prompt_length`.
    """
    tokens = np.full((len(visits), prompt_length), pad_id, np.int32)
    for row, visit in zip(tokens, visits):
        if not 1 <= len(visit.prompt) <= prompt_length:
            raise ValueError(
                f"example {visit.example.id!r}: its prompt has {len(visit.prompt)} tokens, not 1 to {prompt_length}"
            )
        row[: len(visit.prompt)] = visit.prompt
    return PromptBatch(
        tokens=tokens,
        length=np.array([len(visit.prompt) for visit in visits], np.int32),
        uid=np.array([visit.uid for visit in visits], np.uint32).reshape(len(visits), 2),
    )
