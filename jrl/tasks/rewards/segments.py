"""Rewards of the segments of a completion, and of the whole: several kinds of feedback."""

from __future__ import annotations

from collections.abc import Sequence


def segment_rewards(
    right: Sequence[bool], wanted: int, *, factuality: float = 0.3, completeness: float = 0.3
) -> tuple[list[float], float]:
    """Returns R16's reward of every segment, for its factuality, and that of the answer, for its completeness.

        r_k = factuality if the segment is right, else -factuality;  completeness * (right segments / wanted)

    Args:
      right: of each segment, whether it is. wanted: segments that a complete answer has, at least 1.

    Source: Wu et al. 2306.01693, whose kinds of feedback are learned: relevance of sub-sentences, factuality of
    sentences, completeness of answers. Weights are tuned there; 0.3 is a start.
    """
    return [factuality if one else -factuality for one in right], completeness * min(sum(right) / wanted, 1.0)
