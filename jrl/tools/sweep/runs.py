"""Reads the settings, metrics and evaluations of runs from their folders, for comparisons. No run is opened."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jrl import paths
from jrl.config.errors import suggestion
from jrl.run.report.manifest import read_manifest
from jrl.run.report.metrics import read_metrics
from jrl.run.report.summary import read_summary
from jrl.tools.sweep import manifest
from jrl.tools.sweep.settings import settings_of_run

Array = np.ndarray
LAST_SHARE = 10  # a run's score is the mean over the last tenth of its rows
# Settings that are not in config.gin: keys of the manifest's identity whose values are hashes of contents, not names.
FINGERPRINTS = ("tokenizer", "data", "parts")
LABEL_DIGITS = 12  # of the hash of a parts file, in a label
COMPARED = ("manifest.json", "config.gin", "summary.json", "metrics.jsonl")  # the files that a comparison reads
EVALUATION = "eval/"  # before the name of an evaluation in summary.json: "eval/after_rl"


class RunResult(NamedTuple):
    """What a comparison reads of a run."""

    folder: Path
    seed: str
    settings: Mapping[str, str]  # such as {"AdamW.learning_rate": "0.001"}: what distinguishes experiments
    rows: Sequence[Mapping[str, Any]]  # of metrics.jsonl
    evals: Mapping[str, float]  # {"eval/after_rl": mean}; empty until the run is finished
    finished: bool
    address: str | None = None  # gs://BUCKET/NAME; None: it is in a local folder
    parts: Mapping[str, str] = MappingProxyType({})  # {parts file: sha256 of its source}
    changed_after: tuple[int, ...] = ()  # steps after which it was continued with --accept-change

    @property
    def source(self) -> str:
        """Where the user finds the run: its address, or its folder."""
        return self.address or str(self.folder)

    @property
    def name(self) -> str:
        return self.source.rsplit("/", 1)[-1]


def find_runs(folders: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Returns the folders of runs, and a sentence on each member that has not begun. A sweep stands for its members.

    Raises: ValueError for a folder that is neither a run nor a sweep, or that is given twice.
    """
    runs: list[Path] = []
    notes = []
    for folder in folders:
        if paths.exists(folder / manifest.FILE):
            for member in manifest.read(folder)["members"]:
                if paths.exists(folder / member["name"] / "manifest.json"):
                    runs.append(folder / member["name"])
                else:
                    notes.append(f"{folder / member['name']} has not begun")
        elif paths.exists(folder / "manifest.json"):
            runs.append(folder)
        else:
            what = (
                "there is no such folder" if not paths.exists(folder) else "it has no manifest.json and no sweep.json"
            )
            raise ValueError(f"{folder} is not a run or a sweep: {what}")
    resolved = [folder.resolve() for folder in runs]
    for folder, path in zip(runs, resolved):
        if resolved.count(path) > 1:
            raise ValueError(f"{folder} is given twice")
    return runs, notes


def read_run(folder: Path, address: str | None = None) -> RunResult:
    """Returns a run from its folder, or from the local copy of the run at `address`. Raises ValueError or ConfigError
    naming the damaged file."""
    begun = read_manifest(folder / "manifest.json")
    identity = begun["identity"]
    parts = identity["parts"]
    contents = {**identity, "parts": {name: digest[:LABEL_DIGITS] for name, digest in parts.items()}}
    seed, settings = settings_of_run(folder)
    summary = folder / "summary.json"
    content = read_summary(summary) if paths.exists(summary) else None
    evals = {} if content is None else {f"{EVALUATION}{name}": e["mean"] for name, e in content["eval"].items()}
    rows = list(read_metrics(folder / "metrics.jsonl"))
    return RunResult(
        folder=folder,
        seed=seed,
        settings={**settings, **{name: str(contents.get(name)) for name in FINGERPRINTS}},
        rows=rows,
        evals={name: math.nan if value is None else float(value) for name, value in evals.items()},
        finished=content is not None and (not rows or rows[-1]["step"] == content["steps"]),
        address=address,
        parts=parts,
        changed_after=tuple(entry["after_step"] for entry in begun.get("history", ()) if entry["after_step"]),
    )


def series(run: RunResult, metric: str) -> tuple[Array, Array]:
    """Returns the steps that have a metric, and its values (some perhaps not finite; NaN where a step has nothing to
    measure it by): [rows] int64, [rows] float64."""
    rows = [row for row in run.rows if metric in row and (row[metric] is None or _is_number(row[metric]))]
    values = [math.nan if row[metric] is None else float(row[metric]) for row in rows]
    return np.array([row["step"] for row in rows], np.int64), np.array(values, np.float64)


def score(run: RunResult, metric: str) -> float:
    """Returns one number for a run: an evaluation's mean, or the mean of a metric over the last tenth of its numbers.

    Non-finite values do not count; NaN if none is left.
    """
    if metric in run.evals:
        return run.evals[metric]
    values = np.array([float(row[metric]) for row in run.rows if _is_number(row.get(metric))])
    last = values[len(values) - math.ceil(len(values) / LAST_SHARE) :]
    last = last[np.isfinite(last)]
    return float(last.mean()) if len(last) else math.nan


def missing_metrics(metrics: Sequence[str], runs: Sequence[RunResult]) -> list[str]:
    """Returns "metric NAME" for each metric that no run has, with a suggestion."""
    last = [row for run in runs for row in run.rows[-1:]]
    known = {name for row in last for name, value in row.items() if _is_number(value)}.union(*(r.evals for r in runs))
    return [
        f"metric {metric!r}{suggestion(metric, known, kind='metrics')}"
        for metric in metrics
        if metric not in known and not any(_is_number(row.get(metric)) for run in runs for row in run.rows)
    ]


def default_metrics(runs: Sequence[RunResult]) -> list[str]:
    """Returns the reward if a run has it, and the last evaluation that all runs have; the loss if there is neither."""
    evaluated = [name for name in runs[0].evals if all(name in run.evals for run in runs)]
    rewarded = any("reward/mean" in row for run in runs for row in run.rows)
    return [*(["reward/mean"] if rewarded else []), *evaluated[-1:]] or ["loss"]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity")
