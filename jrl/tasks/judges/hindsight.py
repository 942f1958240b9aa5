"""Hindsight: the judge first predicts the outcome of a completion, then grades it in view of that."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.tasks.example import Example
from jrl.tasks.judges.grade import Grade, scaled
from jrl.tasks.judges.questions import Numbers, Question, chat, object_schema, reference_of
from jrl.tasks.rewards.hindsight import hindsight_reward

OUTCOME = '"outcome": "<what the person does after the last answer, and what comes of it>"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hindsight(Grade):
    """One number for a completion and its outcome. The reward is R25, (score - low) / (high - low)."""

    # what the number means, given the outcome
    instructions: str = "Judge how well the person is served by what the answer leads to, not how good it sounds."


def schema(cfg: Hindsight) -> dict[str, Any]:
    score = {"type": "number", "minimum": cfg.low, "maximum": cfg.high}
    return object_schema({"outcome": {"type": "string", "minLength": 1}, "score": score})


def questions(cfg: Hindsight, example: Example, texts: Sequence[str | None]) -> list[Question]:
    """Returns a question for each completion, which asks for its outcome and then its number."""
    reply = f'{{{OUTCOME}, "score": <number from {cfg.low:g} to {cfg.high:g}>}}'
    task = f"Imagine what happens after the answer.\n\n{cfg.instructions}"
    reference = reference_of(example, cfg.reference, "Hindsight.reference")
    return [
        Question(chat(task, reply, example, {"answer": text}, reference=reference), (row,))
        for row, text in enumerate(texts)
        if text is not None
    ]


def numbers(cfg: Hindsight, answer: Mapping[str, Any]) -> Numbers:
    return (hindsight_reward(scaled(cfg, answer["score"]), answer["outcome"]),)
