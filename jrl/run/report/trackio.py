"""Rows to trackio, a local dashboard. Needs the extra jrl-jax[trackio]."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from jrl.run.report.manifest import dashboard_id
from jrl.run.report.metrics import Sink
from jrl.run.report.tensorboard import numbers


def open_trackio(folder: str | os.PathLike[str], *, step: int, config: Mapping[str, Any]) -> Sink:
    """Returns a sink; a resumed run goes on in place. Runs are told apart by their names."""
    module = importlib.import_module("trackio")
    run = module.init(project="jrl", name=dashboard_id(folder), resume="allow", config=dict(config))
    return Sink("trackio", lambda row: run.log(numbers(row), step=row["step"]), run.finish)
