"""Reward for the format of a completion in addition to its correctness."""

from __future__ import annotations


def format_bonus(correct: float, formatted: bool, weight: float) -> float:
    """Returns R2, additive: correct + weight * formatted.

    Args:
      correct: the reward of the answer. formatted: whether the raw text has the format; False for a truncated one.

    Source: open-instruct's additive form. The FormatTags verifier with that weight gives the same.
    """
    return correct + weight * formatted


def format_gate(correct: float, formatted: bool) -> float:
    """Returns R2, gated: correct if the text has the format, else 0.

    Source: open-instruct's gate. A verifier with `extract = 'answer_tag'` gives the same.
    """
    return correct if formatted else 0.0


def format_penalty(correct: float, formatted: bool, penalty: float) -> float:
    """Returns R2 as a penalty: correct - penalty * (1 - formatted)."""
    return correct - penalty * (1 - formatted)
