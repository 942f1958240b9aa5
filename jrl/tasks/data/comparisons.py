"""Comparisons: rows for a pair model, with two answers to a prompt in one text that ends by naming the better one."""

from __future__ import annotations

import dataclasses
import re
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

PLACEHOLDERS = ("{first}", "{second}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparisons:
    """Pairs from the training split of the run's task, as questions which answer is better."""

    chosen: str = "{answer}"  # the better answer: {answer}, or texts of Example.info by name
    rejected: str = "{rejected}"  # the other one
    # The text after the prompt; {first} and {second} are replaced by the answers.
    ask: str = "\nResponse A: {first}\nResponse B: {second}\nThe better response:"
    labels: tuple[str, str] = ("A", "B")  # the verdicts for the first and the second; their first tokens must differ

    def __post_init__(self) -> None:
        for name in ("chosen", "rejected"):
            Template(getattr(self, name), f"Comparisons.{name}")
        if missing := [name for name in PLACEHOLDERS if self.ask.count(name) != 1]:
            raise ValueError(f"Comparisons.ask is {self.ask!r}; it must contain {missing[0]} once")
        if len(self.labels) != 2 or not all(self.labels) or self.labels[0] == self.labels[1]:
            raise ValueError(
                f"Comparisons.labels is {self.labels!r}; it must be two different texts, such as ('A', 'B')"
            )


def rows(config: Comparisons, visits: Sequence[Visit], tokenizer: Any, width: int) -> tuple[StoredRows, dict[str, int]]:
    """Returns P17's sequence for a pair model for every usable visit, and the number of skipped visits by cause. The
    prompt contains both answers, and the completion is the verdict. The better answer comes first in half of the
    visits, chosen by their uid.

    A visit is skipped if its example lacks a text ("no_answer", "no_rejected"), its two answers are the same
    ("same_answers"), or the sequence does not fit `width` ("too_long").

    Source: RLHF Workflow, 2405.07863 section 2.2, where the pair model is a language model trained on such rows.
    """
    templates = [Template(config.chosen, "Comparisons.chosen"), Template(config.rejected, "Comparisons.rejected")]
    first_tokens(config, tokenizer)

    def sequence(visit: Visit) -> tuple[Sequence[int], list[int], float]:
        answers = [template.fill(visit) for template in templates]
        if answers[0] == answers[1]:
            raise LeftOut("same_answers")
        better_is = visit.uid[0] % 2
        first, second = answers if better_is == 0 else reversed(answers)
        prompt = tuple(tokenizer.encode_prompt(comparison_prompt(config, visit.example.messages, first, second)))
        target = completion_of(config.labels[better_is], tokenizer)
        check_fits(prompt, target, width)
        return prompt, target, 1.0

    sequences, counts = of_visits(sequence, visits)
    return stack(sequences, 1, tokenizer.pad_id, width), counts


def comparison_prompt(config: Comparisons, messages: Sequence[Message], first: str, second: str) -> tuple[Message, ...]:
    """Returns a prompt's messages followed by two answers to compare."""
    answers = dict(zip(PLACEHOLDERS, (first, second)))
    # In one pass: an answer that contains "{second}" stays unchanged.
    return continued(
        messages, re.sub("|".join(map(re.escape, PLACEHOLDERS)), lambda match: answers[match[0]], config.ask)
    )


def first_tokens(config: Comparisons, tokenizer: Any) -> tuple[int, int]:
    """Returns the first tokens of the two verdicts.

    Raises: ValueError if they are the same: the first token would not tell which answer is better.
    """
    first, second = (tokenizer.encode(label)[0] for label in config.labels)
    if first == second:
        raise ValueError(f"Comparisons.labels is {config.labels!r}, which begin with the same token; a pair model says "
                         "by the first token which answer is better, as with ('A', 'B')")  # fmt: skip
    return first, second


SOURCE = StoredSource(config=Comparisons, rows=rows)
