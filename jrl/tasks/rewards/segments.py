"""Fine-grained rewards: one per segment of a completion, and one for the whole."""

from __future__ import annotations

from collections.abc import Sequence


def segment_rewards(
    right: Sequence[bool], wanted: int, *, factuality: float = 0.3, completeness: float = 0.3
) -> tuple[list[float], float]:
    """Returns R16's reward of every segment, for its factuality, and that of the answer, for its completeness.

        r_k = factuality if the segment is right, else -factuality
        R   = completeness * min(right segments / wanted, 1)

    Args:
      right: whether each segment is right. wanted: number of segments in a complete answer, at least 1.

    Source: Wu et al. 2306.01693, with learned models for three kinds of feedback: relevance of sub-sentences,
    factuality of sentences, completeness of answers. They tune the weights; 0.3 is a starting point.
    """
    return [factuality if is_right else -factuality for is_right in right], completeness * min(sum(right) / wanted, 1.0)
