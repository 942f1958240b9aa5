"""Pairs with a contrast: two answers to one prompt, the preferred one first, both again after a prompt that asks for a
good answer, and both after one that asks for a bad one."""

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

BETTER, WORSE = -2.0, -4.0  # added to an answer's label after the prompt that asks for a good answer, for a bad one
NONE = -5.0  # label of a row that only fills its unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastedPreferences:
    """Pairs out of the examples of the run's task, on its training split, with prompts that ask for good and for bad
    answers."""

    chosen: str = "{answer}"  # the preferred answer: {answer}, or texts of Example.info by name
    rejected: str = "{rejected}"  # the other one
    better: str = "\nGive a correct and helpful answer."  # what follows the prompt where a good answer is asked for
    worse: str = "\nGive a wrong and useless answer."  # and where a bad one is

    def __post_init__(self) -> None:
        for name in ("chosen", "rejected"):
            Template(getattr(self, name), f"ContrastedPreferences.{name}")
        if self.better == self.worse:
            raise ValueError(f"ContrastedPreferences.better and worse are both {self.better!r}; they must differ")


def rows(
    config: ContrastedPreferences, visits: Sequence[Visit], tokenizer: Any, width: int
) -> tuple[StoredRows, dict[str, int]]:
    """Returns P25's six sequences for every visit that gives a pair: the preferred answer (label 1) and the other one
    (0), both after the prompt that asks for a good answer (label + BETTER), and both after the other prompt (label +
    WORSE); and how many visits gave none.

    Left out are pairs whose example lacks an answer ("no_answer", "no_rejected"), with the same answer twice
    ("same_answers"), or with one that does not fit `width` ("too_long"). Where an answer does not fit after another
    prompt, it stands after its own, as NONE.
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
    return stack([sequence for given in units for sequence in given], 6, tokenizer.pad_id, width), counts


SOURCE = StoredSource(config=ContrastedPreferences, rows=rows, unit_size=6)
