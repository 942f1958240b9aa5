"""Pairwise: the judge compares two answers at a time, in both orders."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jrl.tasks.example import Example
from jrl.tasks.judges.questions import ONE_SENTENCE, Numbers, Question, chat, object_schema, reference_of
from jrl.tasks.rewards.pairwise import pairwise_scores

WINS = {"first": 1.0, "tie": 0.5, "second": 0.0}  # the score of the first answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairwise:
    """Comparisons of two answers. The reward is R20, the share of comparisons won, in [0, 1]. A group of G takes
    G (G - 1) requests, or 2 G against the example's answer."""

    instructions: str = "Decide which of the two answers is better."  # what is compared
    against: Literal["group", "answer"] = "group"  # compare with the group's other completions, or the example's answer

    def __post_init__(self) -> None:
        if not self.instructions.strip():
            name = type(self).__name__
            raise ValueError(f"{name}.instructions is empty; write what makes one answer better than another")


def schema(cfg: Pairwise) -> dict[str, Any]:
    return object_schema({"winner": {"type": "string", "enum": list(WINS)}})


def questions(cfg: Pairwise, example: Example, texts: Sequence[str | None]) -> list[Question]:
    """Returns a question for each ordered pair. The example's answer has the index len(texts)."""
    reply = f'{{{ONE_SENTENCE}, "winner": <"first", "second" or "tie">}}'
    return comparisons(cfg, example, texts, cfg.instructions, reply)


def comparisons(cfg: Pairwise, example: Example, texts: Sequence[str | None], task: str, reply: str) -> list[Question]:
    """Returns the question `task` about each ordered pair, indexed as in `questions`; `reply` describes the JSON."""
    present = [row for row, text in enumerate(texts) if text is not None]
    shown = list(texts)
    if cfg.against == "answer":
        anchor = len(texts)
        shown.append(reference_of(example, True, f"{type(cfg).__name__}.against = 'answer'"))
        pairs = [pair for row in present for pair in ((row, anchor), (anchor, row))]
    else:
        pairs = [(i, j) for i in present for j in present if i != j]
    ask = lambda i, j: chat(task, reply, example, {"first": shown[i], "second": shown[j]}, reference=None)
    return [Question(ask(i, j), (i, j)) for i, j in pairs]


def numbers(cfg: Pairwise, answer: Mapping[str, Any]) -> Numbers:
    return (WINS[answer["winner"]],)


def scores(cfg: Pairwise, asked: Sequence[Question], answers: Sequence[Numbers | None], count: int) -> list[Numbers]:
    size = count + (cfg.against == "answer")
    wins = [[math.nan] * size for _ in range(size)]
    for question, answer in zip(asked, answers):
        if answer is not None:
            i, j = question.rows
            wins[i][j] = answer[0]
    return [(score,) for score in pairwise_scores(wins)[:count]]


def names(cfg: Pairwise) -> tuple[str, ...]:
    return ()
