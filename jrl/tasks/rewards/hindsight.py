"""Reward in hindsight: what is judged is a completion with what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jrl.tasks.example import Message


def hindsight_reward(
    judge: Callable[[Sequence[Message]], float],
    prompt: Sequence[Message],
    completion: str,
    outcome: str | None,
) -> float | None:
    """Returns R25, judge(x, y, outcome) in the place of judge(x, y); None, a missing reward, without an outcome.

    The judge reads the conversation with the outcome as a last message of the user, so that a completion that only
    looks good is judged by what it led to.

    Args:
      judge: of a whole conversation, such as a reward model. prompt: its messages before the completion.
      outcome: what happened next, from a simulation of the user or of the world; None: the simulation failed.

    Source: RLHS, 2501.08617, with one simulated continuation.
    """
    if outcome is None:
        return None
    return judge([*prompt, Message("assistant", completion), Message("user", outcome)])
