"""Process rewards: from scores of the steps of a solution to one reward, or to a reward per step.

A score p_k in [0, 1] rates the solution after step k. It comes from a process reward model, a judge, a verifier of
steps, or the share of continuations that succeed. A completion without steps counts as one step, which the caller
scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def product_of_steps(scores: Sequence[float]) -> float:
    """Returns R15 as an outcome: the product of the scores, the chance that no step is wrong; NaN without steps."""
    return math.prod(scores) if scores else math.nan


def worst_step(scores: Sequence[float]) -> float:
    """Returns R15 as an outcome: the smallest score; NaN without steps. More steps never earn more."""
    return min(scores, default=math.nan)


def last_step(scores: Sequence[float]) -> float:
    """Returns R15 as an outcome: the score after the last step; NaN without steps."""
    return scores[-1] if scores else math.nan


def mean_of_steps(scores: Sequence[float]) -> float:
    """Returns R15 as an outcome: the mean score; NaN without steps. Adding easy steps can raise it."""
    return sum(scores) / len(scores) if scores else math.nan


def step_values(scores: Sequence[float]) -> list[float]:
    """Returns R15 as step rewards, value form: p_k. It rewards having more steps."""
    return list(scores)


def step_differences(scores: Sequence[float], prior: float) -> list[float]:
    """Returns R15 as step rewards, difference form: p_k - p_{k-1}, p_0 = `prior`; their sum is p_K - p_0.

    Steps that change nothing earn nothing. This is R27 with the scores as the potential, except that the potential at
    the end is paid out.

    Args:
      prior: the score before the first step, such as the prompt's success rate.
    """
    return [after - before for before, after in zip([prior, *scores], scores)]
