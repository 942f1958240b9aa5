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
    """The gold answers of the run's task, on its training split."""

    template: str = (
        "{answer}"  # the completion to imitate: {answer}, or {solution} and other texts of Example.info by name
    )
    # what the system message says of the completion, or adds to the prompt's own: texts or numbers of Example.info by
    # name, such as 'Score: {score}\n' or '{feedback}\n'; None: nothing
    condition: str | None = None

    def __post_init__(self) -> None:
        Template(self.template, "Demonstrations.template")
        if self.condition is not None:
            Template(self.condition, "Demonstrations.condition")


def rows(
    config: Demonstrations, visits: Sequence[Visit], tokenizer: Any, width: int
) -> tuple[StoredRows, dict[str, int]]:
    """Returns the sequences of the visits that can be imitated, in order, and how many could not, by cause.

    A completion is the filled template, then the end token. With a condition it is P34's conditional SFT: the prompt
    says how good the completion is, or what was said of it, and these tokens have no loss; a policy is asked for the
    best when it is used.

    Args:
      visits: n or more; those whose example lacks what a template asks for ("no_answer", "no_solution"), or longer than
        `width` ("too_long"), are left out.
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
