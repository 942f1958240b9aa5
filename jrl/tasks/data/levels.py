"""Adaptive level of a procedural task, by the scores at the current level. Host only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelRule:
    """The rule for when a level changes."""

    window: int = 20  # scores in the mean
    up: float = 0.7  # mean above which the level rises
    down: float = 0.1  # mean below which it falls
    lowest: int = 0
    highest: int = 10

    def __post_init__(self) -> None:
        if self.window < 1 or self.lowest > self.highest or self.down > self.up:
            raise ValueError(f"a level rule needs window >= 1, lowest <= highest and down <= up; got {self}")


def next_level(level: int, scores: Sequence[float], rule: LevelRule) -> tuple[int, tuple[float, ...]]:
    """Returns F8: (the next level, the scores to keep).

    With `window` scores: one level up if the mean of the last `window` is above `up`, one down if it is below `down`,
    within [lowest, highest]. A change of level discards the scores. With fewer scores nothing changes.

    Args:
      scores: of the current level, oldest first.

    Source: Reasoning Gym, 2505.24760 (its example configurations have up 0.2 to 0.3 and check every 30 steps).
    """
    recent = tuple(scores)[-rule.window :]
    if len(recent) < rule.window:
        return level, recent
    mean = sum(recent) / len(recent)
    step = 1 if mean > rule.up else -1 if mean < rule.down else 0
    after = min(max(level + step, rule.lowest), rule.highest)
    return after, recent if after == level else ()
