"""Preferences: pairs of answers to one prompt, the preferred one first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stored import StoredRows, StoredSource, Template, stack


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preferences:
    """Pairs out of the examples of the run's task, on its training split."""

    chosen: str = "{answer}"  # the preferred answer: {answer}, or texts of Example.info by name
    rejected: str = "{rejected}"  # the other one

    def __post_init__(self) -> None:
        for name in ("chosen", "rejected"):
            Template(getattr(self, name), f"Preferences.{name}")


def rows(config: Preferences, visits: Sequence[Visit], tokenizer: Any, width: int) -> tuple[StoredRows, dict[str, int]]:
    """Returns two sequences for every visit that gives a pair, the preferred one first, and how many gave none.

    A pair is left out whole (P0): where the example lacks a text ("no_answer", "no_rejected"), where both answers are
    the same ("same_answers"), or where one is longer than `width` ("too_long").
    """
    templates = [Template(config.chosen, "Preferences.chosen"), Template(config.rejected, "Preferences.rejected")]
    counts: dict[str, int] = {}
    sequences = []
    for visit in visits:
        filled = [template.fill(visit) for template in templates]
        cause = next((cause for _, cause in filled if cause is not None), None)
        if cause is None:
            pair = [[*tokenizer.encode(text), tokenizer.end_id] for text, _ in filled]
            if pair[0] == pair[1]:
                cause = "same_answers"
            elif len(visit.prompt) + max(map(len, pair)) > width:
                cause = "too_long"
        if cause is None:
            sequences += [(visit.prompt, pair[0], 1.0), (visit.prompt, pair[1], 0.0)]
        else:
            counts[cause] = counts.get(cause, 0) + 1
    return stack(sequences, 2, tokenizer.pad_id, width), counts


SOURCE = StoredSource(config=Preferences, rows=rows, unit_size=2)
