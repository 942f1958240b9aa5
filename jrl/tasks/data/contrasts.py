"""Contrasted pairs: two answers to one prompt, the preferred one first, repeated after prompts that ask for a good and
for a bad answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stored import (
    LeftOut,
    StoredRows,
    StoredSource,
    Template,
    check_fits,
    check_pair,
    completion_of,
    continued,
    of_visits,
    stack,
)

BETTER, WORSE = -2.0, -4.0  # added to an answer's label after the prompt that asks for a good or a bad answer
NONE = -5.0  # label of a row that only fills its unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastedPreferences:
    """Pairs from the training split of the run's task, with prompts that ask for good and for bad answers."""

    chosen: str = "{answer}"  # the preferred answer: {answer}, or texts of Example.info by name
    rejected: str = "{rejected}"  # the other one
    better: str = "\nGive a correct and helpful answer."  # appended to the prompt to ask for a good answer
    worse: str = "\nGive a wrong and useless answer."  # appended to the prompt to ask for a bad answer

    def __post_init__(self) -> None:
        for name in ("chosen", "rejected"):
            Template(getattr(self, name), f"ContrastedPreferences.{name}")
        if self.better == self.worse:
            raise ValueError(f"ContrastedPreferences.better and worse are both {self.better!r}; they must differ")


def rows(
    config: ContrastedPreferences, visits: Sequence[Visit], tokenizer: Any, width: int
) -> tuple[StoredRows, dict[str, int]]:
    """Returns P25's six sequences for every usable visit: the preferred answer (label 1) and the other one (0), both
    after the prompt that asks for a good answer (label + BETTER), and both after the one that asks for a bad answer
    (label + WORSE). Also returns the number of skipped visits by cause.

    A pair is skipped if its example lacks an answer ("no_answer", "no_rejected"), if both answers are the same
    ("same_answers"), or if one does not fit `width` ("too_long"). An answer that does not fit after one of the longer
    prompts is replaced by the answer after the plain prompt, labeled NONE.
    """
    templates = [Template(getattr(config, name), name) for name in ("chosen", "rejected")]

    def unit(visit: Visit) -> list[tuple[Sequence[int], list[int], float]]:
        pair = [completion_of(template.fill(visit), tokenizer) for template in templates]
        check_pair(visit.prompt, pair, width)
        sequences = [(visit.prompt, pair[0], 1.0), (visit.prompt, pair[1], 0.0)]
        for asked, offset in ((config.better, BETTER), (config.worse, WORSE)):
            prompt = tuple(tokenizer.encode_prompt(continued(visit.example.messages, asked)))
            for answer, label in zip(pair, (1.0, 0.0)):
                try:
                    check_fits(prompt, answer, width)
                    sequences.append((prompt, answer, label + offset))
                except LeftOut:
                    sequences.append((visit.prompt, answer, NONE))
        return sequences

    units, counts = of_visits(unit, visits)
    return stack([sequence for unit in units for sequence in unit], 6, tokenizer.pad_id, width), counts


SOURCE = StoredSource(config=ContrastedPreferences, rows=rows, unit_size=6)
