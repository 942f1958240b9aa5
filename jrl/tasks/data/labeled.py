"""Labeled answers: unpaired answers, each good or bad, with a mismatched row (another prompt's answer) for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stored import (
    LeftOut,
    StoredRows,
    StoredSource,
    Template,
    check_fits,
    completion_of,
    of_visits,
    stack,
)

MISMATCHED = -1.0  # label of a prompt with another prompt's answer
NEITHER = -2.0  # label of a row that only fills its unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labeled:
    """Labeled answers from the training split of the run's task."""

    completion: str = "{answer}"  # the answer: {answer}, or texts of Example.info by name
    label: str = "label"  # the entry of Example.info that says whether it is good: true or false, 1 or 0
    # A bad answer; `completion` is then a good one. Half of the visits, chosen by their uid, give the bad answer and
    # the rest the good one. None: the label decides.
    bad: str | None = None

    def __post_init__(self) -> None:
        for name in ("completion", "bad"):
            if getattr(self, name) is not None:
                Template(getattr(self, name), f"Labeled.{name}")


def rows(config: Labeled, visits: Sequence[Visit], tokenizer: Any, width: int) -> tuple[StoredRows, dict[str, int]]:
    """Returns two sequences for every visit with a labeled answer: the answer (label 1 or 0), and its prompt with the
    answer of the next such visit (MISMATCHED, weight 0), which measures KTO's baseline. Also returns the number of
    skipped visits by cause.

    A visit is skipped if its example lacks a text ("no_answer") or a valid label ("no_label"), or if the answer does
    not fit `width` ("too_long"). If the mismatched sequence does not fit, or there is no other visit, the answer is
    repeated as NEITHER, which is not used for the baseline.
    """
    template = Template(config.completion, "Labeled.completion")
    bad = None if config.bad is None else Template(config.bad, "Labeled.bad")

    def answer(visit: Visit) -> tuple[Sequence[int], list[int], float]:
        is_bad = bad is not None and visit.uid[0] % 2 == 1
        text = bad.fill(visit) if is_bad else template.fill(visit)
        label = visit.example.info.get(config.label) if bad is None else not is_bad
        if not (isinstance(label, bool | int | float) and label in (0, 1)):
            raise LeftOut("no_label")
        completion = completion_of(text, tokenizer)
        check_fits(visit.prompt, completion, width)
        return visit.prompt, completion, float(label)

    answers, counts = of_visits(answer, visits)
    sequences = []
    for i, (prompt, completion, label) in enumerate(answers):
        other = answers[(i + 1) % len(answers)][1]
        fits = len(answers) > 1 and len(prompt) + len(other) <= width
        sequences += [
            (prompt, completion, label),
            (prompt, other, MISMATCHED) if fits else (prompt, completion, NEITHER),
        ]
    stored = stack(sequences, 2, tokenizer.pad_id, width)
    weight = np.tile(np.array([1, 0], np.float32), len(answers))
    return stored._replace(weight=weight), counts


SOURCE = StoredSource(config=Labeled, rows=rows, unit_size=2, mismatched=True)
