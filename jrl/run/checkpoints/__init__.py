"""Run state on disk: saves, digests and the lock of a run folder."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When a run saves itself."""

    every: int = 50  # steps between saves; the last step of a stage is always saved
    keep: int = 2  # newest saves to keep, besides the last of every stage; one is removed once a newer one is verified

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"Checkpoint.every is {self.every}; it counts steps and must be at least 1")
        if self.keep < 1:
            raise ValueError(f"Checkpoint.keep is {self.keep}; a run must keep at least 1 save")
