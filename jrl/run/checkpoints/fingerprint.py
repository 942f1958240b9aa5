"""Content hashes of a run at one step, independent of how its files lie on disk or its arrays on devices."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jrl.run.checkpoints import digest
from jrl.types import PyTree

OUTSIDE = ("time/", "host/")  # metrics that depend on the clock or the machine are not part of a run's contents


def fingerprint(step: int, sections: Mapping[str, PyTree]) -> dict[str, Any]:
    """Returns {"step": step, "total": hex, <section>: hex, ...}; equal content gives equal hashes on any mesh.

    A section is a tree of arrays, JSON values or both (`tree_digest`). The section called "metrics" is a list of rows
    of metrics.jsonl: those after `step` and keys under time/ or host/ do not count. `total` covers `step` and all
    sections.
    """
    hashes = {
        name: rows_digest(value, step) if name == "metrics" else tree_digest(value) for name, value in sections.items()
    }
    total = _json_digest([step, sorted(hashes.items())])
    return {"step": step, "total": total, **hashes}


def run_sections(state: Mapping[str, PyTree], data: PyTree, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the sections that `jrl fingerprint` prints.

    Args:
      state: the fields of a TrainState, as nested mappings. Trained and frozen weights and heads of all roles count as
        params; optimizers, the objective's state and counters as opt_state.
      data: data position, curriculum, in-flight rollouts, verdict journal: arrays and JSON.
      rows: the metrics table.
    """
    models = state["models"]
    pick = lambda *names: {role: {name: model.get(name) for name in names} for role, model in models.items()}
    counters = {name: state.get(name) for name in ("objective", "step", "skipped")}
    return {
        "params": pick("params", "frozen", "heads"),
        "opt_state": {"models": pick("opt_state", "version"), **counters},
        "keys": {"key": state["key"]},
        "data": data,
        "metrics": list(rows),
    }


def tree_digest(tree: PyTree) -> str:
    """Returns sha256 (hex) over the sorted (path, leaf hash) pairs of a tree. None counts, tuples equal lists.

    Arrays hash by dtype, shape and bytes, so 1.0 as float32 differs from 1.0 as float64; other leaves by their JSON.
    """
    pairs = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda value: value is None):
        is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
        pairs.append((digest.leaf_path(path), digest.leaf_digest(leaf) if is_array else _json_digest(leaf)))
    return _json_digest(sorted(pairs))


def rows_digest(rows: Iterable[Mapping[str, Any]], step: int) -> str:
    """Returns sha256 (hex) of the rows up to and with `step`, in order, without keys under time/ or host/."""
    exact = [
        {key: value for key, value in row.items() if not key.startswith(OUTSIDE)} for row in rows if row["step"] <= step
    ]
    return _json_digest(exact)


def _json_digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
