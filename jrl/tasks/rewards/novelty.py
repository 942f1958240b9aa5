"""Reward for novelty: few n-grams in common with a history of texts."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence


def self_bleu(words: Sequence[str], history: Sequence[Sequence[str]], *, max_order: int = 4) -> float:
    """Returns the BLEU of a text against its history, in [0, 1]:

        brevity * exp(mean over n of log p_n),    p_n = clipped matches / n-grams of the text

    Matches of an n-gram are clipped at its largest count in any one text of the history. n goes up to max_order, or to
    the length of a shorter text. brevity = min(1, exp(1 - r / c)), where c is the text's length in words, and r that of
    the history's text closest in length, the shorter one on a tie.

    Args:
      words: the text's words. history: earlier texts, as words.

    Returns: 0 for an empty history, for an empty text, and if an order has no match (BLEU without smoothing).

    Source: BLEU, Papineni et al. 2002.
    """
    orders = range(1, min(max_order, len(words)) + 1)
    if not history or not orders:
        return 0.0
    logs = []
    for order in orders:
        seen = _ngrams(words, order)
        known: collections.Counter[tuple[str, ...]] = collections.Counter()
        for text in history:
            known |= _ngrams(text, order)
        matches = sum((seen & known).values())
        if not matches:
            return 0.0
        logs.append(math.log(matches / sum(seen.values())))
    nearest = min((abs(len(text) - len(words)), len(text)) for text in history)[1]
    return min(1.0, math.exp(1 - nearest / len(words))) * math.exp(sum(logs) / len(logs))


def novelty(
    reward: float, words: Sequence[str], history: Sequence[Sequence[str]], *, coefficient: float = 0.5
) -> float:
    """Returns R23 with n-grams: reward - coefficient * self_bleu(words, history); the reward if the history is empty.

    The caller keeps the history in the run's state, so a resumed run has the same one. The entropy, gibberish and
    embedding terms of the source are left out: they need models.

    Source: curiosity-driven red teaming, 2402.19464.
    """
    return reward - coefficient * self_bleu(words, history)


def _ngrams(words: Sequence[str], order: int) -> collections.Counter[tuple[str, ...]]:
    return collections.Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))
