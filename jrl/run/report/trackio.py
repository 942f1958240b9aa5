"""Rows to trackio, a local dashboard. Needs the extra jrl-jax[trackio]."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from jrl import paths
from jrl.run.report.metrics import Sink
from jrl.run.report.tensorboard import numbers


def open_trackio(folder: str | os.PathLike[str], *, step: int, config: Mapping[str, Any]) -> Sink:
    """Returns a sink; the run's name is the folder's name, so that a resumed run goes on in place."""
    module = importlib.import_module("trackio")
    run = module.init(project="jrl", name=paths.local(folder).resolve().name, resume="allow", config=dict(config))
    return Sink("trackio", lambda row: run.log(numbers(row), step=row["step"]), run.finish)
