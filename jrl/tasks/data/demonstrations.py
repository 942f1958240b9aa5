"""Demonstrations: gold answers as sequences to imitate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stored import (
    StoredRows,
    StoredSource,
    Template,
    check_fits,
    completion_of,
    of_visits,
    stack,
    with_system,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """The gold answers from the training split of the run's task."""

    template: str = (
        "{answer}"  # the completion to imitate: {answer}, or {solution} and other texts of Example.info by name
    )
    # the system message, or what is appended to the prompt's own one, with texts or numbers of Example.info by name,
    # such as 'Score: {score}\n' or '{feedback}\n'; None: nothing
    condition: str | None = None

    def __post_init__(self) -> None:
        Template(self.template, "Demonstrations.template")
        if self.condition is not None:
            Template(self.condition, "Demonstrations.condition")


def rows(
    config: Demonstrations, visits: Sequence[Visit], tokenizer: Any, width: int
) -> tuple[StoredRows, dict[str, int]]:
    """Returns the sequences of the usable visits, in order, and the number of skipped visits by cause.

    A completion is the filled template and the end token. With a condition this is P34's conditional SFT: the prompt
    contains the completion's score or feedback, and these tokens have no loss. At inference, the policy is asked for
    the best.

    Args:
      visits: one is skipped if its example lacks a value of a template ("no_answer", "no_solution"), or if the sequence
        is longer than `width` ("too_long").
      width: T, columns of the arrays.
    """
    template = Template(config.template, "Demonstrations.template")
    condition = None if config.condition is None else Template(config.condition, "Demonstrations.condition")

    def sequence(visit: Visit) -> tuple[Sequence[int], list[int], float]:
        text, prompt = template.fill(visit), visit.prompt
        if condition is not None:
            goal = condition.fill(visit, numbers=True)
            prompt = tuple(tokenizer.encode_prompt(with_system(visit.example.messages, goal)))
        completion = completion_of(text, tokenizer)
        check_fits(prompt, completion, width)
        return prompt, completion, 1.0

    sequences, counts = of_visits(sequence, visits)
    return stack(sequences, 1, tokenizer.pad_id, width), counts


SOURCE = StoredSource(config=Demonstrations, rows=rows)
