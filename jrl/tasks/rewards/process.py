"""Rewards of steps: from scores of each step of a solution to one reward, or to rewards of the steps.

A score p_k in [0, 1] says how good a solution is after step k: of a process reward model, a judge, a verifier of steps,
or the share of continuations that succeed. Without a step the completion is one, which the caller scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def product_of_steps(scores: Sequence[float]) -> float:
    """Returns R15 as an outcome: the product of the scores, the chance that no step is wrong; NaN without a step."""
    return math.prod(scores) if scores else math.nan


def worst_step(scores: Sequence[float]) -> float:
    """Returns R15 as an outcome: the smallest score; NaN without a step. More steps never earn more."""
    return min(scores, default=math.nan)


def last_step(scores: Sequence[float]) -> float:
    """Returns R15 as an outcome: the score after the last step; NaN without a step."""
    return scores[-1] if scores else math.nan


def mean_of_steps(scores: Sequence[float]) -> float:
    """Returns R15 as an outcome: the mean score; NaN without a step. Easy steps can be added to raise it."""
    return sum(scores) / len(scores) if scores else math.nan


def step_values(scores: Sequence[float]) -> list[float]:
    """Returns R15 as rewards of steps, the value form: p_k. It rewards having more steps."""
    return list(scores)


def step_differences(scores: Sequence[float], prior: float) -> list[float]:
    """Returns R15 as rewards of steps, the difference form: p_k - p_{k-1}, p_0 = `prior`; their sum is p_K - p_0.

    What a step changed, so that steps that change nothing earn nothing. It is R27 with the scores as the potential,
    except that the potential of the end is paid out.

    Args:
      prior: the score before the first step, such as the rate of success of the prompt.
    """
    return [after - before for before, after in zip([prior, *scores], scores)]
