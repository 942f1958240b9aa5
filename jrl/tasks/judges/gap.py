"""Gap: the judge grades each completion and the example's answer; the reward is how much better the completion is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jrl.tasks.example import Example
from jrl.tasks.judges import grade
from jrl.tasks.judges.grade import Grade
from jrl.tasks.judges.questions import Numbers, Question
from jrl.tasks.rewards.gap import reward_gap


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gap(Grade):
    """One number for a completion and one for the example's answer. The reward is R26, their difference divided by
    high - low, in [-1, 1]; 0 for the answer itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference:
            raise ValueError("Gap.reference = True shows the judge the very answer that it grades; leave it False")


def questions(cfg: Gap, example: Example, texts: Sequence[str | None]) -> list[Question]:
    """Returns a question about the example's answer, which all rows are compared with, and one for each completion with
    a different text; no questions if there is no completion to judge. Raises ValueError if the example has no answer.
    """
    if example.answer is None:
        raise ValueError(f"example {example.id!r} has no answer; Gap compares with it")
    judged = tuple(row for row, text in enumerate(texts) if text is not None)
    if not judged:
        return []
    (of_answer,) = grade.questions(cfg, example, [example.answer])
    return [
        of_answer._replace(rows=judged),
        *grade.questions(cfg, example, [None if text == example.answer else text for text in texts]),
    ]


def scores(cfg: Gap, asked: Sequence[Question], answers: Sequence[Numbers | None], count: int) -> list[Numbers]:
    rewards = [(math.nan,)] * count
    if not asked:
        return rewards
    of_row = {question.rows[0]: answer for question, answer in zip(asked[1:], answers[1:])}
    number = lambda answer: math.nan if answer is None else answer[0]
    for row in asked[0].rows:
        same = row not in of_row
        score = number(answers[0] if same else of_row[row])
        rewards[row] = (reward_gap(score, number(answers[0]), same),)
    return rewards
