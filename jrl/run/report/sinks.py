"""Other places that rows of metrics go to. Each is one file; none is used unless Log.writers names it."""

from __future__ import annotations

import importlib
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


PACKAGES = {"tensorboard": "tensorboardX"}  # writer -> what it imports, where the name is another
EXTRAS = {"tensorboard": "log"}


def check_writers(writers: Sequence[str]) -> None:
    """Raises ModuleNotFoundError, naming the extra, for a writer that is not installed."""
    for writer in writers:
        try:
            importlib.import_module(PACKAGES.get(writer, writer))
        except ModuleNotFoundError as error:
            extra = EXTRAS.get(writer, writer)
            raise ModuleNotFoundError(
                f"Log.writers names {writer!r}, which needs: pip install 'jrl-jax[{extra}]'"
            ) from error


def open_sinks(
    writers: Sequence[str], folder: str | os.PathLike[str], *, step: int = 0, config: Mapping[str, Any] | None = None
) -> list[Sink]:
    """Returns an open sink for each name of `writers`.

    Args:
      folder: the run folder; its name is the run's name.
      step: completed steps of a resumed run: what a sink holds after them is replaced where it can be.
      config: the resolved configuration as JSON, for services that show it.

    Raises: what a writer raises that cannot be opened, if the run begins. A resumed run continues without that writer.
    """
    return [open_sink(writer, folder, step, config or {}) for writer in writers]


def open_sink(writer: str, folder: str | os.PathLike[str], step: int, config: Mapping[str, Any]) -> Sink:
    try:
        return SINKS[writer](folder, step=step, config=config)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as in `open_metrics`
        if step == 0:
            raise
        return failing(writer, error)


def failing(name: str, error: BaseException) -> Sink:
    """Returns a sink that could not be opened."""

    def write(row: Mapping[str, Any]) -> None:
        raise error

    return Sink(name, write, lambda: None)
