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
    """Pairs with rationales from the training split of the run's task."""

    chosen: str = "{answer}"  # the preferred answer: {answer}, or texts of Example.info by name
    rejected: str = "{rejected}"  # the other one
    rationale: str = "{rationale}"  # why the preferred answer is better
    # the text after the prompt that asks for the rationale: {answer}, {rejected} or other texts of Example.info
    ask: str = "\nBetter: {answer}\nWorse: {rejected}\nWhy?"

    def __post_init__(self) -> None:
        for name in ("chosen", "rejected", "rationale", "ask"):
            Template(getattr(self, name), f"RationalePreferences.{name}")


def rows(
    config: RationalePreferences, visits: Sequence[Visit], tokenizer: Any, width: int
) -> tuple[StoredRows, dict[str, int]]:
    """Returns P35's three sequences for every usable visit: the preferred answer (label 1), the other one (0), and the
    rationale after a prompt that asks for it (RATIONALE). Also returns the number of skipped visits by cause.

    A pair is skipped if its example lacks an answer ("no_answer", "no_rejected"), if both answers are the same
    ("same_answers"), or if one does not fit `width` ("too_long"). If an example lacks a text of `rationale` or `ask`,
    or the rationale does not fit, the preferred answer takes its place, with label NONE and weight 0.
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
