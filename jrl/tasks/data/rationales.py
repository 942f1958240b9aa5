"""Pairs with a rationale: two answers to one prompt, the preferred one first, and why it is preferred."""

from __future__ import annotations

import dataclasses
import itertools
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
    check_pair,
    completion_of,
    continued,
    of_visits,
    stack,
)

RATIONALE = -1.0  # label of a rationale
NONE = -2.0  # label of a row that only fills its unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class RationalePreferences:
    """Pairs out of the examples of the run's task with rationales, on its training split."""

    chosen: str = "{answer}"  # the preferred answer: {answer}, or texts of Example.info by name
    rejected: str = "{rejected}"  # the other one
    rationale: str = "{rationale}"  # why
    # what follows the prompt where the rationale is asked for: {answer}, {rejected} or other texts of Example.info
    ask: str = "\nBetter: {answer}\nWorse: {rejected}\nWhy?"

    def __post_init__(self) -> None:
        for name in ("chosen", "rejected", "rationale", "ask"):
            Template(getattr(self, name), f"RationalePreferences.{name}")


def rows(
    config: RationalePreferences, visits: Sequence[Visit], tokenizer: Any, width: int
) -> tuple[StoredRows, dict[str, int]]:
    """Returns P35's three sequences for every visit that gives a pair: the preferred answer (label 1), the other one
    (0), and the rationale after a prompt with both of them (RATIONALE); and how many visits gave none.

    Left out are pairs whose example lacks an answer ("no_answer", "no_rejected"), with the same answer twice
    ("same_answers"), or with one that does not fit `width` ("too_long"). Where an example has no rationale, or it does
    not fit, the preferred answer stands in its place, as NONE and with weight 0.
    """
    template = {name: Template(getattr(config, name), name) for name in ("chosen", "rejected", "rationale", "ask")}

    def rationale(visit: Visit) -> tuple[Sequence[int], list[int], float]:
        why, ask = (template[name].fill(visit) for name in ("rationale", "ask"))
        prompt = tuple(tokenizer.encode_prompt(continued(visit.example.messages, ask)))
        completion = completion_of(why, tokenizer)
        check_fits(prompt, completion, width)
        return prompt, completion, RATIONALE

    def unit(visit: Visit) -> list[tuple[Sequence[int], list[int], float]]:
        answers = [completion_of(template[name].fill(visit), tokenizer) for name in ("chosen", "rejected")]
        check_pair(visit.prompt, answers, width)
        try:
            third = rationale(visit)
        except LeftOut:
            third = (visit.prompt, answers[0], NONE)
        return [(visit.prompt, answers[0], 1.0), (visit.prompt, answers[1], 0.0), third]

    units, counts = of_visits(unit, visits)
    stored = stack([*itertools.chain(*units)], 3, tokenizer.pad_id, width)
    return stored._replace(weight=(stored.label != NONE).astype(np.float32)), counts


SOURCE = StoredSource(config=RationalePreferences, rows=rows, unit_size=3)
