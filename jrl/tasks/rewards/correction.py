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
    token of the text and is not rewarded; but where it goes on right before the end, by more tokens than it changes
    there, it does not keep the end. Else texts would learn to be empty: their only token would be in every correction.

    Args:
      end_ids: tokens that end a text; where both end with one, the ends are the same token. A correction without one
        was cut: it says nothing of tokens after the last that it keeps, and these have 0. (): no text has an end.

    Source: sequence-to-sequence reward models, Zhou et al. 2409.00162; the rule of the scores is from memory of it.
    """
    ends = bool(tokens) and tokens[-1] in end_ids
    if ends and correction and correction[-1] in end_ids:
        correction = [*correction[:-1], tokens[-1]]
    if all(token in end_ids for token in correction):
        return None
    is_cut = bool(end_ids) and correction[-1] not in end_ids
    rewards, known = [-scale] * len(tokens), 0
    goes_on = False  # right before the block
    opcodes = difflib.SequenceMatcher(None, tokens, correction, autojunk=False).get_opcodes()
    for what, start, stop, start_there, stop_there in opcodes:
        if what == "equal":
            known = stop
            rewards[start:stop] = [scale] * (stop - start)
            if ends and goes_on and stop - start == 1 and stop == len(tokens):
                rewards[-1] = -scale
        goes_on = stop_there - start_there > stop - start
    return rewards if not is_cut else rewards[:known] + [0.0] * (len(tokens) - known)
