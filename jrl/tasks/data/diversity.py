"""Diversity of texts (M14)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jrl.tasks.rewards.novelty import self_bleu


def distinct_ngrams(texts: Sequence[Sequence[str]], n: int) -> float:
    """Returns M14's distinct-n, distinct n-grams / all n-grams of the texts; NaN if no text has n words.

    Args:
      texts: as words; answers to one prompt for diversity within it, or to many for diversity across prompts. Texts
        with fewer than n words are left out.

    Source: Li et al. 1510.03055; per input and across inputs: Kirk et al. 2310.06452.
    """
    if n < 1:
        raise ValueError(f"distinct_ngrams: n = {n} must be at least 1")
    grams = [tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams) if grams else float("nan")


def mean_self_bleu(texts: Sequence[Sequence[str]], *, max_order: int = 4) -> float:
    """Returns M14's self-BLEU, the mean over texts of the BLEU of each against all others: lower is more diverse; NaN
    for fewer than two texts. Empty texts are left out.

    Source: Zhu et al. 1802.01886.
    """
    texts = [text for text in texts if text]
    if len(texts) < 2:
        return float("nan")
    others = lambda i: [*texts[:i], *texts[i + 1 :]]
    return sum(self_bleu(text, others(i), max_order=max_order) for i, text in enumerate(texts)) / len(texts)


def embedding_distance(embeddings: np.ndarray) -> float:
    """Returns M14's mean of 1 - cosine over all pairs of [n, D] float embeddings of texts; NaN for fewer than two.

    Source: Kirk et al. 2310.06452, appendix.
    """
    vectors = np.asarray(embeddings, np.float64)
    n = len(vectors)
    if n < 2:
        return float("nan")
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    total = unit.sum(axis=0)
    return float(1 - (total @ total - (unit**2).sum()) / (n * (n - 1)))
