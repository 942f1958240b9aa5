"""Runs as a comparison reads them, from their folders: settings, metrics, evaluations. No run is opened."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl import paths
from jrl.config.errors import suggestion
from jrl.config.syntax import read_statements
from jrl.experiment import Config
from jrl.run.report.manifest import read_manifest
from jrl.run.report.metrics import read_metrics
from jrl.tools.sweep import manifest
from jrl.tools.sweep.settings import settings_of

Array = np.ndarray
LAST_SHARE = 10  # a run's score is the mean over the last tenth of its rows
# Settings that config.gin does not say, and where the manifest has them: what data and plugins were, not their names.
FINGERPRINTS = {"tokenizer": "tokenizer", "data": "data", "plugins": "parts"}
COMPARED = ("manifest.json", "config.gin", "summary.json", "metrics.jsonl")  # what is read of a run
EVALUATION = "eval/"  # before the name of an evaluation in summary.json: "eval/after_rl"


class RunResult(NamedTuple):
    """A run that exists."""

    folder: Path
    seed: str
    settings: Mapping[str, str]  # "AdamW.learning_rate" -> "0.001": what can make another experiment of it
    rows: Sequence[Mapping[str, Any]]  # of metrics.jsonl
    evals: Mapping[str, float]  # "eval/after_rl" -> mean; none while the run is not finished
    finished: bool
    address: str | None = None  # gs://BUCKET/NAME; None: it is in a local folder

    @property
    def source(self) -> str:
        """Where its user finds it."""
        return self.address or str(self.folder)

    @property
    def name(self) -> str:
        return self.source.rsplit("/", 1)[-1]


def find_runs(folders: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Returns the folders of runs, and a sentence on each that is missing. A sweep stands for its members.

    Raises: ValueError for a folder that is neither a run nor a sweep, or that is given twice.
    """
    found: list[Path] = []
    notes = []
    for folder in folders:
        if paths.exists(folder / manifest.FILE):
            for member in manifest.read(folder)["members"]:
                if paths.exists(folder / member["name"] / "manifest.json"):
                    found.append(folder / member["name"])
                else:
                    notes.append(f"{folder / member['name']} has not begun")
        elif paths.exists(folder / "manifest.json"):
            found.append(folder)
        else:
            what = (
                "there is no such folder" if not paths.exists(folder) else "it has no manifest.json and no sweep.json"
            )
            raise ValueError(f"{folder} is not a run or a sweep: {what}")
    places = [folder.resolve() for folder in found]
    for folder, place in zip(found, places):
        if places.count(place) > 1:
            raise ValueError(f"{folder} is given twice")
    return found, notes


def read_run(folder: Path, address: str | None = None) -> RunResult:
    """Returns a run from its folder, or from a local copy of what is at an address. Raises ValueError or ConfigError
    naming the file that is damaged."""
    identity = read_manifest(folder / "manifest.json")["identity"]
    seed, settings = settings_of(read_statements(str(folder / "config.gin"), (), Config))
    summary = folder / "summary.json"
    found = paths.read_object(summary) if paths.exists(summary) else {}
    evals = {f"{EVALUATION}{name}": result["mean"] for name, result in found.get("eval", {}).items()}
    rows = list(read_metrics(folder / "metrics.jsonl"))
    return RunResult(
        folder=folder,
        seed=seed,
        settings={**settings, **{name: str(identity.get(part)) for name, part in FINGERPRINTS.items()}},
        rows=rows,
        evals={name: math.nan if value is None else float(value) for name, value in evals.items()},
        finished=bool(found) and (not rows or rows[-1]["step"] == found.get("steps")),
        address=address,
    )


def series(run: RunResult, metric: str) -> tuple[Array, Array]:
    """Returns the steps that have a metric, and its values: [rows] int64, [rows] float64, NaN where it is none."""
    pairs = [(row["step"], float(row[metric])) for row in run.rows if _is_number(row.get(metric))]
    return np.array([step for step, _ in pairs], np.int64), np.array([value for _, value in pairs], np.float64)


def score(run: RunResult, metric: str) -> float:
    """Returns one number for a run: of an evaluation its mean, of a metric the mean over the last tenth of its rows.

    Values that are not finite do not count; NaN where none is left.
    """
    if metric in run.evals:
        return run.evals[metric]
    values = series(run, metric)[1]
    last = values[len(values) - math.ceil(len(values) / LAST_SHARE) :]
    last = last[np.isfinite(last)]
    return float(last.mean()) if len(last) else math.nan


def missing_metrics(metrics: Sequence[str], runs: Sequence[RunResult]) -> list[str]:
    """Returns "metric NAME" for each metric that no run has, with the nearest name."""
    known = set[str]().union(*(run.evals for run in runs), *(row for run in runs for row in run.rows[-1:]))
    return [
        f"metric {metric!r}{suggestion(metric, known, kind='metrics')}"
        for metric in metrics
        if metric not in known and not any(_is_number(row.get(metric)) for run in runs for row in run.rows)
    ]


def default_metrics(runs: Sequence[RunResult]) -> list[str]:
    """Returns the reward, and the last evaluation that every run has; the loss where nothing was sampled."""
    evaluated = [name for name in runs[0].evals if all(name in run.evals for run in runs)]
    rewarded = any("reward/mean" in row for run in runs for row in run.rows)
    return [*(["reward/mean"] if rewarded else []), *evaluated[-1:]] or ["loss"]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity")
