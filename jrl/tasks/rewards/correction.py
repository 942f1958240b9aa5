"""Rewards of tokens by a correction of the text that they make (P28)."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def correction_rewards(
    tokens: Sequence[int], correction: Sequence[int], *, scale: float, end_ids: Sequence[int] = ()
) -> list[float] | None:
    """Returns P28's reward of every token: `scale` where the correction keeps it, -scale where it changes or deletes
    it. None where the correction is empty: nothing is known then.

    Kept are the tokens of the longest blocks that both have in common, in order. What the correction inserts is no
    token of the text and is not rewarded; but where it inserts right before the end, it does not keep the end. Else
    texts would learn to be empty: their only token would be in every correction.

    Args:
      end_ids: tokens that end a text; where both end with one, the ends are the same token.

    Source: sequence-to-sequence reward models, Zhou et al. 2409.00162; the rule of the scores is from memory of it.
    """
    ends = bool(tokens) and tokens[-1] in end_ids
    if ends and correction and correction[-1] in end_ids:
        correction = [*correction[:-1], tokens[-1]]
    if all(token in end_ids for token in correction):
        return None
    rewards = [-scale] * len(tokens)
    inserted = False  # right before the block
    for what, start, stop, *_ in difflib.SequenceMatcher(None, tokens, correction, autojunk=False).get_opcodes():
        if what == "equal":
            rewards[start:stop] = [scale] * (stop - start)
            if ends and inserted and stop - start == 1 and stop == len(tokens):
                rewards[-1] = -scale
        inserted = what == "insert"
    return rewards
