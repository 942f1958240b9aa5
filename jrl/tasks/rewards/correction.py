"""Rewards of tokens by a correction of the text that they make (P28)."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def correction_rewards(tokens: Sequence[int], correction: Sequence[int], *, scale: float) -> list[float] | None:
    """Returns P28's reward of every token: `scale` where the correction keeps it, -scale where it changes or deletes
    it. None where the correction is empty: nothing is known then.

    Kept are the tokens of the longest blocks that both have in common, in order. What the correction inserts is no
    token of the text and is not rewarded.

    Source: sequence-to-sequence reward models, Zhou et al. 2409.00162; the rule of the scores is from memory of it.
    """
    if not correction:
        return None
    rewards = [-scale] * len(tokens)
    for start, _, size in difflib.SequenceMatcher(None, tokens, correction, autojunk=False).get_matching_blocks():
        rewards[start : start + size] = [scale] * size
    return rewards
