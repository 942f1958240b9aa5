"""Pairs with a score as the goal in the prompt: of two scored answers, the one with that score is preferred."""

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
    number_text,
    of_visits,
    stack,
    with_system,
)
from jrl.tasks.example import Message

PLACEHOLDER = "{score}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConditionedPreferences:
    """Pairs from the training split of the run's task, with a score as the goal in the prompt."""

    chosen: str = "{answer}"  # an answer: {answer}, or texts of Example.info by name
    rejected: str = "{rejected}"  # the other one
    scores: tuple[str, str] = ("value", "rejected_value")  # the entries of Example.info with the scores of both
    goal: str = "Score: {score}\n"  # the system message, or what is appended to the prompt's own one

    def __post_init__(self) -> None:
        for name in ("chosen", "rejected"):
            Template(getattr(self, name), f"ConditionedPreferences.{name}")
        if PLACEHOLDER not in self.goal:
            raise ValueError(f"ConditionedPreferences.goal is {self.goal!r}; it must contain {PLACEHOLDER}")


def rows(
    config: ConditionedPreferences, visits: Sequence[Visit], tokenizer: Any, width: int
) -> tuple[StoredRows, dict[str, int]]:
    """Returns P24's two sequences for every usable visit, the preferred one first, and the number of skipped visits by
    cause.

    Half of the visits, chosen by their uid, ask for the score of `chosen` and prefer it; the other half ask for that of
    `rejected` and prefer it. At inference, the policy is asked for the best score.

    A pair is skipped if the example lacks a text ("no_answer", "no_rejected") or a finite score ("no_scores"), if the
    two scores ("same_scores") or texts ("same_answers") are the same, or if one sequence with its goal is longer than
    `width` ("too_long").
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
        preferred = visit.uid[0] % 2
        prompt = tuple(tokenizer.encode_prompt(asked(config, visit, scores[preferred])))
        check_pair(prompt, answers, width)
        return [(prompt, answers[preferred], 1.0), (prompt, answers[1 - preferred], 0.0)]

    units, counts = of_visits(unit, visits)
    return stack([*itertools.chain(*units)], 2, tokenizer.pad_id, width), counts


def asked(config: ConditionedPreferences, visit: Visit, score: float) -> tuple[Message, ...]:
    """Returns the messages of a visit with the goal for a score in the system message."""
    return with_system(visit.example.messages, config.goal.replace(PLACEHOLDER, number_text(score)))


SOURCE = StoredSource(config=ConditionedPreferences, rows=rows, unit_size=2)
