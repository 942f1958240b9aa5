"""Mixing of tasks: the share of each task in the prompts. Host only."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def size_shares(sizes: Array, *, alpha: float) -> Array:
    """Returns F12 by size: shares proportional to n^alpha, [tasks] float64. alpha = 1: proportional to size; 0: equal.

    Args:
      sizes: [tasks] int, numbers of examples; an empty task has share 0.

    Raises: ValueError if every task is empty.
    """
    sizes = np.asarray(sizes, np.float64)
    weight = np.where(sizes > 0, np.maximum(sizes, 1) ** alpha, 0)
    if not weight.any():
        raise ValueError("no task has an example")
    return weight / weight.sum()


def progress_shares(earlier: Array, later: Array, judged: Array, *, floor: float) -> Array:
    """Returns F12 by learning progress: shares proportional to |later - earlier| + floor, [tasks] float64.

    A task that was not judged in both windows counts as having the largest progress of the others, so that it is tried;
    if none was judged, the shares are equal. A task that gets worse also gets a larger share.

    Args:
      earlier, later: [tasks] float, mean outcomes of two windows, ignored where not judged. judged: [tasks] bool.
    """
    progress = np.where(judged, np.abs(later - earlier), 0)
    weight = np.where(judged, progress, progress.max(initial=0.0)) + floor
    return weight / weight.sum() if weight.any() else np.full(len(weight), 1 / len(weight))


def draw_task(shares: Array, uniform: float) -> int:
    """Returns F12's draw: the task for a uniform number in [0, 1), by the cumulative shares."""
    ends = np.cumsum(shares)
    return int(min(np.searchsorted(ends / ends[-1], uniform, side="right"), np.flatnonzero(shares)[-1]))
