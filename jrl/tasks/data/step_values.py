"""Step values: each visit gives one step of a solution, and the success rates before and after it."""

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
    """Solutions in steps, with success rates, from the training split of the run's task."""

    values: ClassVar[tuple[str, str]] = ("before", "after")  # a row's two values: success rates before and after a step

    steps: str = "steps"  # the entry of Example.info with the texts of the steps
    # the entry of Example.info with success rates from 0 to 1: of the prompt, then of the prefix through each step
    success: str = "success"
    separator: str = "\n"  # after every step

    def __post_init__(self) -> None:
        if self.steps == self.success:
            raise ValueError(f"StepValues.steps and StepValues.success name the same entry, {self.steps!r}")


def rows(config: StepValues, visits: Sequence[Visit], tokenizer: Any, width: int) -> tuple[StoredRows, dict[str, int]]:
    """Returns a sequence for every usable visit: a solution through one step, chosen uniformly by its uid. The earlier
    steps are part of the prompt, and the end token follows the solution's last step. `value` [n, 2] has the success
    rates before and after the step. Also returns the number of skipped visits by cause.

    A visit is skipped if its example lacks steps that are texts ("no_steps"), or does not have one success rate more
    than steps ("no_success"), or if the solution through that step does not fit `width` ("too_long").
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

    steps, counts = of_visits(step, visits)
    value = np.array([rates for _, rates in steps], np.float32).reshape(len(steps), 2)
    return stack([sequence for sequence, _ in steps], 1, tokenizer.pad_id, width)._replace(value=value), counts


SOURCE = StoredSource(config=StepValues, rows=rows)
