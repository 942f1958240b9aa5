"""Corrections: rows that teach a model to rewrite an answer into a better one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stored import (
    LeftOut,
    StoredRows,
    StoredSource,
    Template,
    check_fits,
    completion_of,
    continued,
    of_visits,
    stack,
)
from jrl.tasks.example import Message

PLACEHOLDER = "{response}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corrections:
    """Pairs from the training split of the run's task, as corrections to imitate."""

    chosen: str = "{answer}"  # the better answer, which is the target: {answer}, or texts of Example.info by name
    rejected: str = "{rejected}"  # the other one
    ask: str = "\nResponse: {response}\nCorrected response:"  # the text after the prompt; {response} is an answer

    def __post_init__(self) -> None:
        for name in ("chosen", "rejected"):
            Template(getattr(self, name), f"Corrections.{name}")
        if PLACEHOLDER not in self.ask:
            raise ValueError(f"Corrections.ask is {self.ask!r}; it must contain {PLACEHOLDER}")


def rows(config: Corrections, visits: Sequence[Visit], tokenizer: Any, width: int) -> tuple[StoredRows, dict[str, int]]:
    """Returns P28's sequence for every usable visit, and the number of skipped visits by cause. The completion is the
    better answer. The prompt contains the other answer in half of the visits, chosen by their uid, and the better one
    in the rest.

    A visit is skipped if its example lacks a text ("no_answer", "no_rejected"), its two answers are the same
    ("same_answers"), or the sequence does not fit `width` ("too_long").
    """
    templates = [Template(config.chosen, "Corrections.chosen"), Template(config.rejected, "Corrections.rejected")]

    def sequence(visit: Visit) -> tuple[Sequence[int], list[int], float]:
        answers = [template.fill(visit) for template in templates]
        if answers[0] == answers[1]:
            raise LeftOut("same_answers")
        asked = correction_prompt(config, visit.example.messages, answers[visit.uid[0] % 2])
        prompt, target = tuple(tokenizer.encode_prompt(asked)), completion_of(answers[0], tokenizer)
        check_fits(prompt, target, width)
        return prompt, target, 1.0

    sequences, counts = of_visits(sequence, visits)
    return stack(sequences, 1, tokenizer.pad_id, width), counts


def correction_prompt(config: Corrections, messages: Sequence[Message], response: str) -> tuple[Message, ...]:
    """Returns a prompt's messages followed by a response to rewrite."""
    return continued(messages, config.ask.replace(PLACEHOLDER, response))


SOURCE = StoredSource(config=Corrections, rows=rows)
