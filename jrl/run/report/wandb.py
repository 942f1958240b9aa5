"""Rows to Weights & Biases. Needs the extra jrl-jax[wandb] and whatever account its own settings name."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from jrl import paths
from jrl.run.report.manifest import dashboard_id
from jrl.run.report.metrics import Sink
from jrl.run.report.tensorboard import numbers


def open_wandb(folder: str | os.PathLike[str], *, step: int, config: Mapping[str, Any]) -> Sink:
    """Returns a sink; a resumed run goes on in place.

    WANDB_MODE=offline keeps everything on this machine. Steps that a service already has are ignored by it.
    """
    module = importlib.import_module("wandb")
    name = paths.local(folder).resolve().name
    shown = dict(project="jrl", name=name, dir=str(folder), config=dict(config))
    run = module.init(id=dashboard_id(folder), resume="allow", **shown)
    return Sink("wandb", lambda row: run.log(numbers(row), step=row["step"]), run.finish)
