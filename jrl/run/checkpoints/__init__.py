"""Run state on disk: saves, digests and the lock of a run folder."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When a run saves itself."""

    every: int = 50  # steps between saves; the last step of a stage is always saved
    # Newest saves to keep, besides the last of every stage, the one with the highest held-out accuracy (Eval.every) and
    # the newest that a later step has learned from. One is removed once a newer one is verified.
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"Checkpoint.every is {self.every}; it counts steps and must be at least 1")
        if self.keep < 1:
            raise ValueError(f"Checkpoint.keep is {self.keep}; a run must keep at least 1 save")
