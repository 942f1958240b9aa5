"""Gold answers as sequences to imitate: the rows of a supervised warm start. Plain numpy on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.data.prompts import Visit


class Supervised(NamedTuple):
    """Sequences left-aligned from column 0, prompt then completion."""

    tokens: np.ndarray  # [n, T] int32, pad_id beyond length
    length: np.ndarray  # [n] int32, prompt and completion
    action_mask: np.ndarray  # [n, T] bool, the completion and its end token: what is learned


def supervise(
    visits: Sequence[Visit], tokenizer: Any, *, width: int, template: str = "{answer}"
) -> tuple[Supervised, dict[str, int]]:
    """Returns the sequences of the visits that can be imitated, in order, and how many could not, by cause.

    A completion is `template` with the example's answer in place of {answer}, then the end token.

    Args:
        visits: n or more; those without an answer ("no_answer") or longer than `width` ("too_long") are left out.
        width: T, columns of the arrays.
    Raises: ValueError for a template without {answer}.
    """
    if "{answer}" not in template:
        raise ValueError(f"template {template!r} has no {{answer}} in it")
    counts: dict[str, int] = {}
    rows: list[tuple[tuple[int, ...], list[int]]] = []
    for visit in visits:
        answer = visit.example.answer
        cause = "no_answer"
        if answer is not None:
            completion = [*tokenizer.encode(template.replace("{answer}", answer)), tokenizer.end_id]
            cause = None if len(visit.prompt) + len(completion) <= width else "too_long"
        if cause is None:
            rows.append((visit.prompt, completion))
        else:
            counts[cause] = counts.get(cause, 0) + 1
    tokens = np.full((len(rows), width), tokenizer.pad_id, np.int32)
    length = np.zeros(len(rows), np.int32)
    action_mask = np.zeros((len(rows), width), bool)
    for i, (prompt, completion) in enumerate(rows):
        length[i] = len(prompt) + len(completion)
        tokens[i, : length[i]] = [*prompt, *completion]
        action_mask[i, len(prompt) : length[i]] = True
    return Supervised(tokens, length, action_mask), counts
