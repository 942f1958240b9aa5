"""Reward for the format of a completion beside its correctness."""

from __future__ import annotations


def format_bonus(correct: float, formatted: bool, weight: float) -> float:
    """Returns R2, additive: correct + weight * formatted.

    Args:
      correct: the reward of the answer. formatted: the raw text has the format; False for a truncated one.

    Source: open-instruct's additive form. Of verifiers, this is FormatTags with that weight.
    """
    return correct + weight * formatted


def format_gate(correct: float, formatted: bool) -> float:
    """Returns R2, gated: correct where the text has the format, else 0.

    Source: open-instruct's gate. Of one verifier, this is `extract = 'answer_tag'`.
    """
    return correct if formatted else 0.0


def format_penalty(correct: float, formatted: bool, penalty: float) -> float:
    """Returns R2 as a penalty: correct - penalty * (1 - formatted)."""
    return correct - penalty * (1 - formatted)
