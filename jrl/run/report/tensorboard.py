"""TensorBoard events beside metrics.jsonl, in RUN/tensorboard. Needs the extra jrl-jax[log]."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping
from typing import Any

from jrl import paths
from jrl.run.report.metrics import Sink

FLUSH_SECONDS = 10


def open_tensorboard(folder: str | os.PathLike[str], *, step: int, config: Mapping[str, Any]) -> Sink:
    """Returns a sink of numbers by step. TensorBoard drops points after `step` that an earlier process wrote."""
    module = importlib.import_module("tensorboardX")
    target = paths.make_dir(paths.local(folder) / "tensorboard")
    writer = module.SummaryWriter(str(target), purge_step=step + 1, flush_secs=FLUSH_SECONDS)

    def write(row: Mapping[str, Any]) -> None:
        for name, value in numbers(row).items():
            writer.add_scalar(name, value, row["step"])

    return Sink("tensorboard", write, writer.close)


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of a row but its step; text and missing values are for metrics.jsonl."""
    values = {}
    for name, value in row.items():
        if name != "step" and value is not None and not isinstance(value, str) and math.isfinite(value):
            values[name] = float(value)
    return values
