"""Steps of solutions with success rates: a step of one at each visit, and how likely a right end is around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.step_labels import is_label, is_list, steps_of
from jrl.tasks.data.stored import LeftOut, StoredRows, StoredSource, check_fits, of_visits, stack


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepValues:
    """Solutions in steps out of the examples of the run's task, on its training split."""

    values: ClassVar[tuple[str, str]] = ("before", "after")  # the two numbers of a row, success rates around its step

    steps: str = "steps"  # the entry of Example.info with the texts of the steps
    # the entry of Example.info with success rates from 0 to 1: of the prompt, then of the prefix through each step
    success: str = "success"
    separator: str = "\n"  # after every step

    def __post_init__(self) -> None:
        if self.steps == self.success:
            raise ValueError(f"StepValues.steps and StepValues.success name one entry, {self.steps!r}")


def rows(config: StepValues, visits: Sequence[Visit], tokenizer: Any, width: int) -> tuple[StoredRows, dict[str, int]]:
    """Returns a sequence for every visit: a solution through one step, which its uid chooses with equal chances; the
    steps before it are prompt, and the end token follows the last one. Its `value` is the success rates before and
    after the step, [n, 2].

    Left out are visits whose example lacks the steps ("no_steps", also where they are no texts) or one success rate
    more than it has steps ("no_success"), and solutions that do not fit `width` through that step ("too_long").
    """

    def step(visit: Visit) -> tuple[tuple[Sequence[int], list[int], float], list[float]]:
        steps, success = steps_of(visit, config.steps), visit.example.info.get(config.success)
        if not (is_list(success) and len(success) == len(steps) + 1 and all(map(is_label, success))):
            raise LeftOut("no_success")
        chosen = visit.uid[0] % len(steps)
        encode = lambda texts: [token for text in texts for token in tokenizer.encode(text + config.separator)]
        completion = [*encode([steps[chosen]]), *[tokenizer.end_id] * (chosen == len(steps) - 1)]
        prompt = [*visit.prompt, *encode(steps[:chosen])]
        check_fits(prompt, completion, width)
        return (prompt, completion, 1.0), [float(success[chosen]), float(success[chosen + 1])]

    made, counts = of_visits(step, visits)
    value = np.array([around for _, around in made], np.float32).reshape(len(made), 2)
    return stack([sequence for sequence, _ in made], 1, tokenizer.pad_id, width)._replace(value=value), counts


SOURCE = StoredSource(config=StepValues, rows=rows)
