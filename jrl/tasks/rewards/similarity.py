"""Reward for likeness to a reference text."""

from __future__ import annotations

import difflib


def similarity(text: str, reference: str) -> float:
    """Returns R4: 2 M / (len(text) + len(reference)), in [0, 1]; M characters match.

    M is that of the longest-matching-blocks alignment (Ratcliff and Obershelp): the longest common block, then the same
    to its left and to its right. Two empty texts are alike (1), one empty text is like no other (0).

    Time is quadratic in the length, at worst cubic.

    Source: SWE-RL, 2502.18449, with Python's difflib; nothing counts as junk there, which difflib's default would have.
    """
    return difflib.SequenceMatcher(None, text, reference, autojunk=False).ratio()
