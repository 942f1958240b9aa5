"""Step labels: each visit gives a solution up to one step, and whether that step is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jrl.tasks.data.preferences import finite
from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stored import LeftOut, StoredRows, StoredSource, check_fits, of_visits, stack


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLabels:
    """Solutions in steps, with a label for each step, from the training split of the run's task."""

    steps: str = "steps"  # the entry of Example.info with the texts of the steps
    # the entry of Example.info with a label for each: true or false, or a number from 0 to 1, such as the share of its
    # continuations with a right answer
    labels: str = "labels"
    separator: str = "\n"  # after every step
    through_first_wrong: bool = False  # steps after the first wrong one (label up to 0.5) are not trained on


def rows(config: StepLabels, visits: Sequence[Visit], tokenizer: Any, width: int) -> tuple[StoredRows, dict[str, int]]:
    """Returns a sequence for every usable visit: its solution through one step, chosen uniformly by its uid, with the
    label of that step. Also returns the number of skipped visits by cause.

    A visit is skipped if its example lacks steps that are texts ("no_steps") or a label from 0 to 1 for each of them
    ("no_labels"), or if the solution through that step does not fit `width` ("too_long").
    """

    def sequence(visit: Visit) -> tuple[Sequence[int], list[int], float]:
        steps, labels = steps_of(visit, config.steps), visit.example.info.get(config.labels)
        if not (is_list(labels) and len(labels) == len(steps) and all(map(is_label, labels))):
            raise LeftOut("no_labels")
        wrong = next((i for i, label in enumerate(labels) if label <= 0.5), len(steps) - 1)
        chosen = visit.uid[0] % (wrong + 1 if config.through_first_wrong else len(steps))
        completion = [token for step in steps[: chosen + 1] for token in tokenizer.encode(step + config.separator)]
        check_fits(visit.prompt, completion, width)
        return visit.prompt, completion, float(labels[chosen])

    sequences, counts = of_visits(sequence, visits)
    return stack(sequences, 1, tokenizer.pad_id, width), counts


def steps_of(visit: Visit, name: str) -> Sequence[str]:
    """Returns the texts of a solution's steps. Raises LeftOut("no_steps") if Example.info has no such list."""
    steps = visit.example.info.get(name)
    if not (is_list(steps) and all(isinstance(step, str) and step for step in steps)):
        raise LeftOut("no_steps")
    return steps


def is_list(value: Any) -> bool:
    """Returns whether an entry of Example.info is a non-empty list."""
    return isinstance(value, list | tuple) and len(value) > 0


def is_label(value: Any) -> bool:
    """Returns whether an entry of a list is true, false, or a number from 0 to 1."""
    return isinstance(value, bool) or (finite(value) and 0 <= value <= 1)


SOURCE = StoredSource(config=StepLabels, rows=rows)
