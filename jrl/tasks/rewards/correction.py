"""Token rewards from a corrected version of the text (P28)."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

DENSE = 64  # equal tokens of the other text per token, from which rows of numpy are faster


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
    for tag, start, stop, correction_start, correction_stop in _Matcher(tokens, correction).get_opcodes():
        if tag == "equal":
            known = stop
            rewards[start:stop] = [scale] * (stop - start)
            if ends and inserts and stop - start == 1 and stop == len(tokens):
                rewards[-1] = -scale
        inserts = correction_stop - correction_start > stop - start
    return rewards if not is_truncated else rewards[:known] + [0.0] * (len(tokens) - known)


class _Matcher(difflib.SequenceMatcher):
    """difflib's longest common blocks. Its search visits every pair of equal tokens, which takes minutes for two texts
    that repeat a few tokens; here such a search computes the blocks that end at each token with numpy."""

    def __init__(self, a: Sequence[int], b: Sequence[int]) -> None:
        super().__init__(None, a, b, autojunk=False)
        self._tokens, self._others = np.asarray(a), np.asarray(b)
        self._pairs = [0, *itertools.accumulate(len(self.b2j.get(token, ())) for token in a)]  # of the first i tokens

    def find_longest_match(self, alo: int = 0, ahi: Any = None, blo: int = 0, bhi: Any = None) -> difflib.Match:
        ahi, bhi = len(self.a) if ahi is None else ahi, len(self.b) if bhi is None else bhi
        if self._pairs[ahi] - self._pairs[alo] <= DENSE * (ahi - alo):
            return super().find_longest_match(alo, ahi, blo, bhi)
        longest, others = difflib.Match(alo, blo, 0), self._others[blo:bhi]
        size, next_size = np.zeros((2, bhi - blo + 1), np.int32)  # of the block that ends before each other token
        for i in range(alo, ahi):
            np.multiply(size[:-1] + 1, others == self._tokens[i], out=next_size[1:])
            size, next_size = next_size, size
            end = int(size.argmax())
            if size[end] > longest.size:  # the first such block, as difflib takes it
                longest = difflib.Match(i + 1 - int(size[end]), blo + end - int(size[end]), int(size[end]))
        return longest
