"""Rewards for the completions of a prompt from pairwise comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pairwise_scores(wins: Sequence[Sequence[float]]) -> list[float]:
    """Returns R20, the mean preference for each completion over the others:

        P_ij = (wins_ij + 1 - wins_ji) / 2,    R_i = mean of P_ij over the j that were compared with i in both orders

    Two orders that contradict each other count as a tie, 0.5.

    Args:
      wins: G x G floats; wins[i][j] is 1 if i wins when shown first and j second, 0 if j wins, 0.5 for a tie, NaN if
        there is no verdict. The diagonal is not read.

    Returns: G floats in [0, 1]; NaN for a completion that was compared with no other, as in a group of one.

    Source: SALMON, 2310.05910; Self-Reference, 2406.11190; both orders, as in TRL's judges.
    """
    group = range(len(wins))
    preferences = [[(wins[i][j] + 1 - wins[j][i]) / 2 for j in group if j != i] for i in group]
    answered = [[p for p in row if not math.isnan(p)] for row in preferences]
    return [sum(row) / len(row) if row else math.nan for row in answered]
