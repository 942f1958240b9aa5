"""Fine-grained rewards: one per segment of a completion, and one for the whole."""

from __future__ import annotations

from collections.abc import Sequence


def segment_rewards(
    right: Sequence[bool], num_segments: int, *, factuality: float = 0.3, completeness: float = 0.3
) -> tuple[list[float], float]:
    """Returns R16's reward of every segment, for its factuality, and that of the answer, for its completeness.

        r_k = factuality if the segment is right, else -factuality
        R   = completeness * min(right segments / num_segments, 1)

    Args:
      right: whether each segment is right. num_segments: number of segments in a complete answer, at least 1.

    Source: Wu et al. 2306.01693, with learned models for three kinds of feedback: relevance of sub-sentences,
    factuality of sentences, completeness of answers. They tune the weights; 0.3 is a starting point.
    """
    share = min(sum(right) / num_segments, 1.0)
    return [factuality if is_right else -factuality for is_right in right], completeness * share
