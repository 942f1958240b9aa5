"""Rubric: the judge answers yes or no to each item, and the reward is their weighted sum."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.tasks.example import Example
from jrl.tasks.judges.questions import ONE_SENTENCE, Numbers, Question, chat, object_schema, reference_of
from jrl.tasks.rewards.rubric import rubric_score, stretched

STEEPEST = 100.0  # above this, exp leaves nothing but the best answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rubric:
    """Yes-or-no items about a completion, asked at once. The reward is R14, in [-1, 1]."""

    items: dict[str, float]  # statement about the answer -> weight; the weight of a flaw is negative
    critical: tuple[str, ...] = ()  # items whose failure makes the reward 0
    # (item, another, weight): terms for items that count when both are true
    interactions: tuple[tuple[str, str, float], ...] = ()
    saturation: float | None = None  # how strongly large weights are damped (R14's a); None: not damped
    stretch: float | None = None  # how strongly differences among good answers are amplified; None: not amplified
    instructions: str = "Decide for each item whether it is true of the answer."  # before the items
    reference: bool = False  # the judge sees the example's answer

    def __post_init__(self) -> None:
        if not any(self.items.values()):
            raise ValueError("Rubric.items must have at least one item whose weight is not 0, such as "
                             "{'The answer is polite.': 1.0}")  # fmt: skip
        if unknown := [text for text in self.critical if text not in self.items]:
            raise ValueError(f"Rubric.critical has {unknown[0]!r}, which is not in Rubric.items")
        for interaction in self.interactions:
            if len(interaction) != 3 or len({*interaction[:2]} & {*self.items}) != 2:
                raise ValueError(f"Rubric.interactions has {interaction!r}; each is two different items and a "
                                 "weight, such as ('It is short.', 'It is kind.', 0.5)")  # fmt: skip
        weights = [*self.items.values(), *(weight for _, _, weight in self.interactions)]
        if unbounded := [weight for weight in weights if not math.isfinite(weight)]:
            raise ValueError(f"Rubric.items or Rubric.interactions has the weight {unbounded[0]}; it must be finite")
        for name in ("saturation", "stretch"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= STEEPEST:
                raise ValueError(f"Rubric.{name} = {value} must be above 0 and at most {STEEPEST:g}, or None for off")


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
    reply = ", ".join(f'"{key}": <true or false>' for key in keys(cfg))
    reference = reference_of(example, cfg.reference, "Rubric.reference")
    task = f"{cfg.instructions}\n\n{listed}"
    return [
        Question(chat(task, f"{{{ONE_SENTENCE}, {reply}}}", example, {"answer": text}, reference=reference), (row,))
        for row, text in enumerate(texts)
        if text is not None
    ]


def numbers(cfg: Rubric, answer: Mapping[str, Any]) -> Numbers:
    return tuple(float(answer[key]) for key in keys(cfg))


def scores(cfg: Rubric, asked: Sequence[Question], answers: Sequence[Numbers | None], count: int) -> list[Numbers]:
    missing = (math.nan,) * (1 + len(cfg.items))
    rewards = [missing] * count
    weights = [weight for _, weight in in_order(cfg)]
    texts = [text for text, _ in in_order(cfg)]
    critical = [text in cfg.critical for text in texts]
    interactions = [(texts.index(one), texts.index(other), weight) for one, other, weight in cfg.interactions]
    for question, answer in zip(asked, answers):
        if answer is not None:
            reward = rubric_score(answer, weights, critical, interactions, cfg.saturation)
            reward = reward if cfg.stretch is None else stretched(reward, cfg.stretch)
            rewards[question.rows[0]] = (reward, *answer)
    return rewards


def names(cfg: Rubric) -> tuple[str, ...]:
    return tuple(keys(cfg))
