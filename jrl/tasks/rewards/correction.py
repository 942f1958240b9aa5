"""Token rewards from a corrected version of the text (P28)."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def correction_rewards(
    tokens: Sequence[int], correction: Sequence[int], *, scale: float, end_ids: Sequence[int] = ()
) -> list[float] | None:
    """Returns P28's reward of every token: `scale` if the correction keeps it, -scale if it changes or deletes it.
    None if the correction is empty, which gives no information.

    The kept tokens are those of the longest common blocks, in order. Tokens that the correction inserts are not in the
    text and get no reward. But if the correction inserts more tokens right before the end token than it replaces
    there, the end token does not count as kept. Otherwise the policy would learn to write empty texts, whose only token
    would be in every correction.

    Args:
      end_ids: tokens that end a text; if both texts end with one, the two ends count as the same token. A correction
        without one was truncated: tokens after the last kept one get 0. (): texts have no end token.

    Source: sequence-to-sequence reward models, Zhou et al. 2409.00162; the scoring rule is from memory of it.
    """
    ends = bool(tokens) and tokens[-1] in end_ids
    if ends and correction and correction[-1] in end_ids:
        correction = [*correction[:-1], tokens[-1]]
    if all(token in end_ids for token in correction):
        return None
    is_truncated = bool(end_ids) and correction[-1] not in end_ids
    rewards, known = [-scale] * len(tokens), 0
    inserts = False  # the correction inserts more than it replaces right before the block
    opcodes = difflib.SequenceMatcher(None, tokens, correction, autojunk=False).get_opcodes()
    for tag, start, stop, correction_start, correction_stop in opcodes:
        if tag == "equal":
            known = stop
            rewards[start:stop] = [scale] * (stop - start)
            if ends and inserts and stop - start == 1 and stop == len(tokens):
                rewards[-1] = -scale
        inserts = correction_stop - correction_start > stop - start
    return rewards if not is_truncated else rewards[:known] + [0.0] * (len(tokens) - known)
