"""EquationSteps: every line of a solution that is an equation is a step, which is right if its sides are equal.

It stands in for a process reward model: its step scores become one reward, or rewards of the steps' last tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from jrl.tasks.example import Example
from jrl.tasks.rewards.process import (
    last_step,
    mean_of_steps,
    product_of_steps,
    step_differences,
    step_values,
    worst_step,
)
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.contract import SPANS_LIMIT
from jrl.tasks.verifiers.polynomial import NoPolynomial, read_polynomial

OUTCOMES: dict[str, Callable[[Sequence[float]], float]] = {
    "min": worst_step, "product": product_of_steps, "last": last_step, "mean": mean_of_steps,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class EquationSteps:
    """Lines such as 2+3=5, with numbers or letters, are scored 1 or 0 (R15). Other lines are not steps."""

    weight: float = 1.0  # of this verifier in the reward
    # One reward from the step scores: min, product, last or mean. Or, with an outcome reward of 0, a reward per step on
    # its last token: differences (p_k - p_{k-1}), or values (p_k), which reward having more steps.
    reward: Literal["min", "product", "last", "mean", "differences", "values"] = "min"
    prior: float = 0.5  # p_0 of differences: the score before the first step


def score(config: EquationSteps, completion: str, example: Example) -> Verdict:
    """Returns CORRECT if all steps are right, else WRONG; UNPARSABLE without steps, scored as one step with 0;
    FORBIDDEN if more than SPANS_LIMIT steps would be rewarded."""
    steps = steps_of(completion)
    ends, scores = [end for end, _ in steps] or [len(completion)], [float(right) for _, right in steps] or [0.0]
    status = Status.CORRECT if min(scores) else Status.WRONG if steps else Status.UNPARSABLE
    detail = "" if steps else "no line is an equation"
    if config.reward in OUTCOMES:
        return Verdict(status, OUTCOMES[config.reward](scores), detail)
    if len(ends) > SPANS_LIMIT:
        return Verdict(Status.FORBIDDEN, None, f"{len(ends)} steps; at most {SPANS_LIMIT} are rewarded")
    rewards = step_values(scores) if config.reward == "values" else step_differences(scores, config.prior)
    return Verdict(status, 0.0, detail, tuple(zip(ends, rewards)) if completion else ())


def steps_of(completion: str) -> list[tuple[int, bool]]:
    """Returns (characters of the completion up to the end of the line, is right) of every line with an equation."""
    steps, end = [], 0
    for line in completion.split("\n"):
        end += len(line)
        if (right := holds(line)) is not None:
            steps.append((end, right))
        end += 1
    return steps


def holds(line: str) -> bool | None:
    """Returns whether all sides of an equation are equal; None if the line is not an equation."""
    if "=" not in line:
        return None
    try:
        sides = [read_polynomial(side) for side in line.split("=")]
    except NoPolynomial:
        return None
    return all(side == sides[0] for side in sides)
