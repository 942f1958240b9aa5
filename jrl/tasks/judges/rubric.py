"""Rubric: the judge answers yes or no to each item, and the reward is their weighted sum."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.tasks.example import Example
from jrl.tasks.judges.questions import ONE_SENTENCE, Numbers, Question, chat, object_schema, reference_of
from jrl.tasks.rewards.rubric import rubric_score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rubric:
    """Yes-or-no items about a completion, asked at once. The reward is R14, in [-1, 1]."""

    items: dict[str, float]  # what is true of the answer -> weight; a negative one is a flaw's
    critical: tuple[str, ...] = ()  # items whose failure makes the reward 0
    instructions: str = "Decide for each item whether it is true of the answer."  # before the items
    reference: bool = False  # the judge sees the example's answer

    def __post_init__(self) -> None:
        if not any(self.items.values()):
            raise ValueError("Rubric.items must have at least one item whose weight is not 0, such as "
                             "{'The answer is polite.': 1.0}")  # fmt: skip
        if unknown := [text for text in self.critical if text not in self.items]:
            raise ValueError(f"Rubric.critical has {unknown[0]!r}, which is none of Rubric.items")


def in_order(cfg: Rubric) -> list[tuple[str, float]]:
    """Returns the items sorted by text: two configurations with the same items ask the same question."""
    return sorted(cfg.items.items())


def keys(cfg: Rubric) -> list[str]:
    return [f"item_{number}" for number in range(1, len(cfg.items) + 1)]


def schema(cfg: Rubric) -> dict[str, Any]:
    return object_schema({key: {"type": "boolean"} for key in keys(cfg)})


def questions(cfg: Rubric, example: Example, texts: Sequence[str | None]) -> list[Question]:
    """Returns a question for each completion."""
    listed = "\n".join(f"{key}: {text}" for key, (text, _) in zip(keys(cfg), in_order(cfg)))
    wanted = ", ".join(f'"{key}": <true or false>' for key in keys(cfg))
    reference = reference_of(example, cfg.reference, "Rubric.reference")
    task = f"{cfg.instructions}\n\n{listed}"
    return [
        Question(chat(task, f"{{{ONE_SENTENCE}, {wanted}}}", example, {"answer": text}, reference=reference), (row,))
        for row, text in enumerate(texts)
        if text is not None
    ]


def numbers(cfg: Rubric, answer: Mapping[str, Any]) -> Numbers:
    return tuple(float(answer[key]) for key in keys(cfg))


def scores(cfg: Rubric, asked: Sequence[Question], found: Sequence[Numbers | None], count: int) -> list[Numbers]:
    missing = (math.nan,) * (1 + len(cfg.items))
    rewards = [missing] * count
    weights = [weight for _, weight in in_order(cfg)]
    critical = [text in cfg.critical for text, _ in in_order(cfg)]
    for question, answer in zip(asked, found):
        if answer is not None:
            rewards[question.rows[0]] = (rubric_score(answer, weights, critical), *answer)
    return rewards


def names(cfg: Rubric) -> tuple[str, ...]:
    return tuple(keys(cfg))
