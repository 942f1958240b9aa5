"""Gold answers as sequences to imitate: the rows of a supervised warm start. Plain numpy on the host."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.tasks.data.prompts import Visit

PLACES = ("{answer}", "{solution}")


class Supervised(NamedTuple):
    """Sequences left-aligned from column 0, prompt then completion."""

    tokens: np.ndarray  # [n, T] int32, pad_id beyond length
    length: np.ndarray  # [n] int32, prompt and completion
    action_mask: np.ndarray  # [n, T] bool, the completion and its end token: what is learned


def supervise(
    visits: Sequence[Visit], tokenizer: Any, *, width: int, template: str = "{answer}"
) -> tuple[Supervised, dict[str, int]]:
    """Returns the sequences of the visits that can be imitated, in order, and how many could not, by cause.

    A completion is `template` with the example's answer in place of {answer}, and what it was taken out of (see
    jrl.tasks.envs.columns) in place of {solution}, then the end token.

    Args:
        visits: n or more; those without an answer ("no_answer"), without a solution where the template has one
            ("no_solution"), or longer than `width` ("too_long") are left out.
        width: T, columns of the arrays.
    Raises: ValueError for a template with neither.
    """
    if not any(place in template for place in PLACES):
        raise ValueError(f"template {template!r} has neither {' nor '.join(PLACES)} in it")
    counts: dict[str, int] = {}
    rows: list[tuple[tuple[int, ...], list[int]]] = []
    for visit in visits:
        values = visit.example.answer, visit.example.info.get("solution")
        cause = next((f"no_{place[1:-1]}" for place, value in zip(PLACES, values)
                      if place in template and not isinstance(value, str)), None)  # fmt: skip
        if cause is None:
            completion = [*tokenizer.encode(_filled(template, values)), tokenizer.end_id]
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


def _filled(template: str, values: Sequence[str]) -> str:
    """Returns the template with every place filled at once: what stands in a value is text."""
    known = dict(zip(PLACES, values))
    return "".join(known.get(part, part) for part in re.split(r"(\{answer\}|\{solution\})", template))
