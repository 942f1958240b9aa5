"""Reward over-optimization: gold scores as a function of the distance from the reference (M15). Host only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Array = np.ndarray


class OverOptimization(NamedTuple):
    distance: Array  # [checkpoints] float64, square roots of the KL, ascending
    gold: Array  # [checkpoints] float64, in that order
    proxy: Array  # [checkpoints] float64, in that order
    peak: float  # the highest gold score
    peak_distance: float  # distance of the peak; at ties the smallest
    lost: float  # the peak minus the gold score at the farthest checkpoint
    mismatch: float  # share of steps between checkpoints in which proxy and gold move in opposite directions


def over_optimization(kl: Array, proxy: Array, gold: Array) -> OverOptimization:
    """Returns M15's curve of a run's checkpoints, or of runs that differ in beta, against sqrt(KL).

    Args:
      kl: [checkpoints] float, KL(policy, reference) of whole sequences, in nats, by a non-negative estimator: k3, not
        k1.
      proxy, gold: [checkpoints] float, the reward trained on and the true one. Checkpoints with a NaN are left out.

    Raises: ValueError for a negative KL, or if fewer than two checkpoints are left.

    Source: Gao et al. 2210.10760; of direct methods, Rafailov et al. 2406.02900.
    """
    kl, proxy, gold = (np.asarray(x, np.float64) for x in (kl, proxy, gold))
    known = np.isfinite(kl) & np.isfinite(proxy) & np.isfinite(gold)
    if (kl[known] < 0).any():
        raise ValueError(f"over_optimization: a KL of {kl[known].min()}; estimate it by k3, which is not negative")
    if known.sum() < 2:
        raise ValueError(
            f"over_optimization: {known.sum()} checkpoints with a KL and both scores; it takes two or more"
        )
    order = np.argsort(kl[known], kind="stable")
    distance, proxy, gold = np.sqrt(kl[known][order]), proxy[known][order], gold[known][order]
    best = int(gold.argmax())
    opposite = np.diff(proxy) * np.diff(gold) < 0
    return OverOptimization(
        distance=distance,
        gold=gold,
        proxy=proxy,
        peak=float(gold[best]),
        peak_distance=float(distance[best]),
        lost=float(gold[best] - gold[-1]),
        mismatch=float(opposite.mean()),
    )
