"""Pairs whose prompt asks for a score: of two scored answers either one is preferred, where its own is asked for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jrl.tasks.data.preferences import finite
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
    with_system,
)
from jrl.tasks.example import Message

PLACE = "{score}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConditionedPreferences:
    """Pairs out of the examples of the run's task, on its training split, with a score as the goal in the prompt."""

    chosen: str = "{answer}"  # an answer: {answer}, or texts of Example.info by name
    rejected: str = "{rejected}"  # the other one
    scores: tuple[str, str] = ("value", "rejected_value")  # the entries of Example.info with the scores of both
    goal: str = "Score: {score}\n"  # what the system message says, or adds to the prompt's own

    def __post_init__(self) -> None:
        for name in ("chosen", "rejected"):
            Template(getattr(self, name), f"ConditionedPreferences.{name}")
        if PLACE not in self.goal:
            raise ValueError(f"ConditionedPreferences.goal is {self.goal!r}; it must hold {PLACE}")


def rows(
    config: ConditionedPreferences, visits: Sequence[Visit], tokenizer: Any, width: int
) -> tuple[StoredRows, dict[str, int]]:
    """Returns P24's two sequences for every visit that gives a pair, the preferred one first, and how many gave none.

    Half of the visits, by their uid, ask for the score of `chosen`, which then is preferred; the other half ask for
    that of `rejected`, and prefer it. A policy is asked for the best score when it is used.

    A pair is left out whole: where the example lacks a text ("no_answer", "no_rejected") or a finite score
    ("no_scores"), where both have one score ("same_scores") or are one text ("same_answers"), and where one is longer
    than `width` with its goal ("too_long").
    """
    templates = [Template(getattr(config, name), name) for name in ("chosen", "rejected")]

    def unit(visit: Visit) -> list[tuple[Sequence[int], list[int], float]]:
        texts = [template.fill(visit) for template in templates]
        scores = [visit.example.info.get(name) for name in config.scores]
        if not all(map(finite, scores)):
            raise LeftOut("no_scores")
        if scores[0] == scores[1]:
            raise LeftOut("same_scores")
        answers = [completion_of(text, tokenizer) for text in texts]
        wanted = visit.uid[0] % 2
        prompt = tuple(tokenizer.encode_prompt(asked(config, visit, scores[wanted])))
        check_pair(prompt, answers, width)
        return [(prompt, answers[wanted], 1.0), (prompt, answers[1 - wanted], 0.0)]

    units, counts = of_visits(unit, visits)
    return stack([*itertools.chain(*units)], 2, tokenizer.pad_id, width), counts


def asked(config: ConditionedPreferences, visit: Visit, score: float) -> tuple[Message, ...]:
    """Returns the messages of a visit with a score as their goal."""
    return with_system(visit.example.messages, config.goal.replace(PLACE, f"{score:g}"))


SOURCE = StoredSource(config=ConditionedPreferences, rows=rows, unit_size=2)
