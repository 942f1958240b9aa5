"""Other places that rows of metrics go to. Each is one file; none is used unless Log.writers names it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.run.report import tensorboard, trackio, wandb
from jrl.run.report.metrics import Sink

SINKS = {
    "tensorboard": tensorboard.open_tensorboard,
    "wandb": wandb.open_wandb,
    "trackio": trackio.open_trackio,
}


def open_sinks(
    writers: Sequence[str], folder: str | os.PathLike[str], *, step: int = 0, config: Mapping[str, Any] | None = None
) -> list[Sink]:
    """Returns an open sink for each name of `writers`.

    Args:
      folder: the run folder; its name is the run's name.
      step: completed steps of a resumed run: what a sink holds after them is replaced where it can be.
      config: the resolved configuration as JSON, for services that show it.
    Raises ModuleNotFoundError naming the extra to install; ValueError for an unknown name.
    """
    for writer in writers:
        if writer not in SINKS:
            raise ValueError(f"there is no metrics writer {writer!r}; there are {', '.join(SINKS)}")
    return [SINKS[writer](folder, step=step, config=config or {}) for writer in writers]
