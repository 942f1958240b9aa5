"""Rated answers: unpaired answers with a number for each of several attributes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jrl.tasks.data.preferences import finite
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rated:
    """Rated answers from the training split of the run's task."""

    completion: str = "{answer}"  # the answer: {answer}, or texts of Example.info by name
    # the entries of Example.info with the ratings, in the order of the reward head's outputs; an example may lack some
    values: tuple[str, ...] = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
    complete: bool = False  # leave out answers that lack one of them
    lowest: float = 0.0  # of a rating
    highest: float = 4.0  # of a rating

    def __post_init__(self) -> None:
        Template(self.completion, "Rated.completion")
        if not self.values or len(set(self.values)) != len(self.values):
            raise ValueError(f"Rated.values names the attributes that are rated, each once; got {self.values}")
        if not -math.inf < self.lowest < self.highest < math.inf:
            raise ValueError(f"Rated.lowest = {self.lowest} must be below Rated.highest = {self.highest}; 0 and 4 are "
                             "those of HelpSteer2")  # fmt: skip


def rows(config: Rated, visits: Sequence[Visit], tokenizer: Any, width: int) -> tuple[StoredRows, dict[str, int]]:
    """Returns a sequence for every usable visit, with its ratings in `value` [n, K], NaN where one is missing; and the
    number of skipped visits by cause.

    A visit is skipped if its example lacks a text ("no_answer"), has no rating, or with `complete` lacks one
    ("no_values"), has a rating that is not a number in [lowest, highest] ("bad_value"), or if the sequence does not
    fit `width` ("too_long").
    """
    template = Template(config.completion, "Rated.completion")

    def rated(visit: Visit) -> tuple[tuple[Sequence[int], list[int], float], list[float]]:
        text = template.fill(visit)
        values = [visit.example.info.get(name) for name in config.values]
        given = [value for value in values if value is not None]
        if not given or (config.complete and len(given) < len(values)):
            raise LeftOut("no_values")
        if not all(finite(value) and config.lowest <= value <= config.highest for value in given):
            raise LeftOut("bad_value")
        completion = completion_of(text, tokenizer)
        check_fits(visit.prompt, completion, width)
        return (visit.prompt, completion, 1.0), [math.nan if value is None else value for value in values]

    rated_rows, counts = of_visits(rated, visits)
    value = np.array([ratings for _, ratings in rated_rows], np.float32).reshape(len(rated_rows), len(config.values))
    return stack([sequence for sequence, _ in rated_rows], 1, tokenizer.pad_id, width)._replace(value=value), counts


SOURCE = StoredSource(config=Rated, rows=rows)
