"""Preferences: pairs of answers to one prompt, the preferred one first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jrl.config.typed import LARGEST
from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stored import (
    LeftOut,
    StoredRows,
    StoredSource,
    Template,
    check_pair,
    completion_of,
    of_visits,
    stack,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preferences:
    """Pairs from the training split of the run's task."""

    chosen: str = "{answer}"  # the preferred answer: {answer}, or texts of Example.info by name
    rejected: str = "{rejected}"  # the other one
    # the entry of Example.info with the probability that the preferred answer is the better one, above 0.5; None: 1
    strength: str | None = None
    # the entries of Example.info with the values of both answers, the preferred one's first; None: no values
    values: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        for name in ("chosen", "rejected"):
            Template(getattr(self, name), f"Preferences.{name}")
        if self.values is not None and len(self.values) != 2:
            raise ValueError(
                f"Preferences.values names two entries of Example.info, of both answers; got {self.values}"
            )


def rows(config: Preferences, visits: Sequence[Visit], tokenizer: Any, width: int) -> tuple[StoredRows, dict[str, int]]:
    """Returns two sequences for every usable visit, the preferred one first, and the number of skipped visits by cause.

    A pair is skipped (P0) if the example lacks a text ("no_answer", "no_rejected"), if both answers are the same
    ("same_answers"), if one sequence is longer than `width` ("too_long"), if the strength is missing or not in
    (0.5, 1] ("no_strength"), or if a value is missing, not finite, or not higher for the preferred answer
    ("no_values"). The labels of a pair are its strength and 1 - strength.
    """
    templates = [Template(config.chosen, "Preferences.chosen"), Template(config.rejected, "Preferences.rejected")]

    def unit(visit: Visit) -> tuple[list[tuple[Sequence[int], list[int], float]], tuple[float, float]]:
        texts = [template.fill(visit) for template in templates]
        pair = [completion_of(text, tokenizer) for text in texts]
        check_pair(visit.prompt, pair, width)
        strength = 1.0 if config.strength is None else visit.example.info.get(config.strength)
        # The label must be above 0.5 in float32 too.
        if not (isinstance(strength, int | float) and 0.5 < strength <= 1 and np.float32(strength) > 0.5):
            raise LeftOut("no_strength")
        values = (0.0, 0.0) if config.values is None else tuple(visit.example.info.get(name) for name in config.values)
        if config.values is not None and not are_ordered(values):
            raise LeftOut("no_values")
        return [(visit.prompt, pair[0], float(strength)), (visit.prompt, pair[1], 1 - float(strength))], values

    units, counts = of_visits(unit, visits)
    stored = stack([sequence for pair, _ in units for sequence in pair], 2, tokenizer.pad_id, width)
    return stored._replace(value=np.array([value for _, values in units for value in values], np.float32)), counts


def are_ordered(values: Sequence[Any]) -> bool:
    """Returns whether two values are finite numbers, the first one higher."""
    return all(map(finite, values)) and values[0] > values[1]


def finite(value: Any) -> bool:
    """Returns whether an entry of Example.info is a number that is finite in float32."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


SOURCE = StoredSource(config=Preferences, rows=rows, unit_size=2)
