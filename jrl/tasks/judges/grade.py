"""Grade: the judge gives each completion one number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.tasks.example import Example
from jrl.tasks.judges.questions import ONE_SENTENCE, Numbers, Question, chat, object_schema, reference_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grade:
    """One number for a completion. The reward is (score - low) / (high - low)."""

    instructions: str = "Judge how correct and helpful the answer is."  # what the number means
    low: float = 0.0  # the worst score
    high: float = 10.0  # the best score
    reference: bool = False  # the judge sees the example's answer

    def __post_init__(self) -> None:
        if not 0 < self.high - self.low < math.inf:
            raise ValueError(f"{type(self).__name__} has low {self.low} and high {self.high}; low must be below high, "
                             "by a finite number")  # fmt: skip


def schema(cfg: Grade) -> dict[str, Any]:
    return object_schema({"score": {"type": "number", "minimum": cfg.low, "maximum": cfg.high}})


def questions(cfg: Grade, example: Example, texts: Sequence[str | None]) -> list[Question]:
    """Returns a question for each completion."""
    reply = f'{{{ONE_SENTENCE}, "score": <number from {cfg.low:g} to {cfg.high:g}>}}'
    reference = reference_of(example, cfg.reference, "Grade.reference")
    return [
        Question(chat(cfg.instructions, reply, example, {"answer": text}, reference=reference), (row,))
        for row, text in enumerate(texts)
        if text is not None
    ]


def numbers(cfg: Grade, answer: Mapping[str, Any]) -> Numbers:
    return (scaled(cfg, answer["score"]),)


def scaled(cfg: Grade, score: float) -> float:
    """Returns (score - low) / (high - low)."""
    return (score - cfg.low) / (cfg.high - cfg.low)


def scores(cfg: Grade, asked: Sequence[Question], answers: Sequence[Numbers | None], count: int) -> list[Numbers]:
    rewards = [(math.nan,)] * count
    for question, answer in zip(asked, answers):
        if answer is not None:
            rewards[question.rows[0]] = answer
    return rewards


def names(cfg: Grade) -> tuple[str, ...]:
    return ()
