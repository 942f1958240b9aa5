"""The content hashes of a run folder at one step. Reads only, so it works while the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl import paths
from jrl.run.checkpoints.fingerprint import fingerprint, run_sections
from jrl.run.checkpoints.run_state import DamagedStep, list_steps, restore_step, verify_step
from jrl.run.report.metrics import read_metrics
from jrl.types import PyTree

# Entries of the host part of a save that depend on the clock or the machine (the rows of metrics hold times), or on
# which steps were saved, as Checkpoint.every may change when a run is resumed; and what `evals` were measured by.
OUTSIDE = ("time", "metrics_offset", "metrics_sha256", "best", "eval_identity")


def run_fingerprint(folder: str | Path, step: int | None = None) -> dict[str, Any]:
    """Returns {"step","total","params","opt_state","keys","data","metrics"} of the newest saved step, or of `step`.

    Raises: ValueError if the folder holds no run or no such step; DamagedStep if it is not what was saved.
    """
    chosen = step if step is not None else newest(folder)
    while True:
        try:
            tree, host = read_step(folder, chosen)
            break
        except DamagedStep:
            # A run in progress removes old steps, possibly while they are read.
            if step is not None or newest(folder) == chosen:
                raise
            chosen = newest(folder)
    state = tree.pop("state")
    data = {"host": {name: value for name, value in host.items() if name not in OUTSIDE}, **tree}
    rows = read_metrics(Path(folder) / "metrics.jsonl", chosen)
    return fingerprint(chosen, run_sections(state, data, rows))


def newest(folder: str | Path) -> int:
    """Returns the newest saved step of a run. Raises ValueError if the folder holds no run, or nothing is saved."""
    return saved_steps(folder)[-1]


def saved_steps(folder: str | Path) -> list[int]:
    """Returns the saved steps of a run, oldest first. Raises ValueError if there is none."""
    if not paths.exists(folder):
        raise ValueError(f"{folder} does not exist; give the --run folder of jrl train")
    if not paths.exists(Path(folder) / "manifest.json"):
        raise ValueError(f"{folder} is not a run folder: it holds no manifest.json; give the --run folder of jrl train")
    steps = list_steps(Path(folder) / "checkpoints")
    if not steps:
        if paths.exists(Path(folder) / "summary.json"):
            raise ValueError(f"{folder} holds a run that has ended, and its checkpoints were removed")
        raise ValueError(f"{folder} holds a run that has saved nothing yet")
    return steps


def read_step(folder: str | Path, step: int) -> tuple[dict[str, PyTree], dict[str, Any]]:
    """Returns (tree, host) of a saved step: nested dicts of numpy arrays, named as the save names them.

    Needs neither the run's configuration nor its devices. Every file and leaf is hashed against the step's manifest.
    """
    root = Path(folder) / "checkpoints"
    if step not in (present := saved_steps(folder)):
        raise ValueError(f"{folder} has no checkpoint of step {step}; there are {', '.join(map(str, present))}")
    target: dict[str, Any] = {}
    for name, leaf in verify_step(root, step)["leaves"].items():
        *parents, last = name.split("/")
        node = target
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = _target(leaf)
    _, tree, host = restore_step(root, target, step)
    return tree, host


def _target(leaf: dict[str, Any]) -> Any:
    """Returns what to restore a leaf as: a numpy array, or random keys, which only JAX has a type for."""
    if "impl" in leaf:
        key = jax.eval_shape(lambda: jax.random.key(0, impl=leaf["impl"]))
        return jax.ShapeDtypeStruct(tuple(leaf["shape"]), key.dtype)
    return np.empty(tuple(leaf["shape"]), np.dtype(leaf["dtype"]))
