"""Demonstrations: gold answers as sequences to imitate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stored import StoredRows, StoredSource, Template, stack


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """The gold answers of the run's task, on its training split."""

    template: str = (
        "{answer}"  # the completion to imitate: {answer}, or {solution} and other texts of Example.info by name
    )

    def __post_init__(self) -> None:
        Template(self.template, "Demonstrations.template")


def rows(
    config: Demonstrations, visits: Sequence[Visit], tokenizer: Any, width: int
) -> tuple[StoredRows, dict[str, int]]:
    """Returns the sequences of the visits that can be imitated, in order, and how many could not, by cause.

    A completion is the filled template, then the end token.

    Args:
      visits: n or more; those whose example lacks what the template asks for ("no_answer", "no_solution"), or longer
        than `width` ("too_long"), are left out.
      width: T, columns of the arrays.
    """
    template = Template(config.template, "Demonstrations.template")
    counts: dict[str, int] = {}
    sequences = []
    for visit in visits:
        text, cause = template.fill(visit)
        if text is not None:
            completion = [*tokenizer.encode(text), tokenizer.end_id]
            cause = None if len(visit.prompt) + len(completion) <= width else "too_long"
        if cause is None:
            sequences.append((visit.prompt, completion, 1.0))
        else:
            counts[cause] = counts.get(cause, 0) + 1
    return stack(sequences, 1, tokenizer.pad_id, width), counts


SOURCE = StoredSource(config=Demonstrations, rows=rows)
