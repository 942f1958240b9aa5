"""Reward for similarity to a reference text."""

from __future__ import annotations

import difflib


def similarity(text: str, reference: str) -> float:
    """Returns R4: 2 M / (len(text) + len(reference)), in [0, 1], where M is the number of matching characters.

    M comes from the alignment of Ratcliff and Obershelp: the longest common block, then the same to its left and to its
    right. Two empty texts score 1; an empty and a non-empty text score 0.

    Takes quadratic time in the length, cubic in the worst case.

    Source: SWE-RL, 2502.18449, with Python's difflib; without its default junk heuristic.
    """
    return difflib.SequenceMatcher(None, text, reference, autojunk=False).ratio()
