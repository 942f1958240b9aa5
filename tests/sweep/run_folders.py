"""Folders as a run leaves them, without the run."""

from __future__ import annotations

import json

from jrl.run.report.metrics import row_line


def write_run(folder, *, rows, seed=0, settings=None, evals=None, finished=True, data="d", parts=None):
    """Writes the files that a comparison reads, and returns the folder.

    Args:
      rows: metrics of each step, from step 1. settings: further lines of config.gin, name -> gin text.
    """
    folder.mkdir(parents=True)
    identity = {"config": "c", "tokenizer": "t", "data": data, "parts": parts or {}, "seed": seed}
    manifest = {"format": 1, "identity": identity, "config": {}, "environment": {}, "promise": ""}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    bound = {"Run.seed": seed, "AdamW.learning_rate": 0.001, "Log.samples": 2, **(settings or {})}
    (folder / "config.gin").write_text("".join(f"{name} = {value}\n" for name, value in bound.items()))
    lines = [row_line({"step": step, **row}) for step, row in enumerate(rows, start=1)]
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    if finished:
        evaluations = {name: {"mean": mean} for name, mean in (evals or {}).items()}
        summary = {"steps": len(rows), "seconds": {"total": 1.0}, "eval": evaluations}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def rewards(*values):
    return [{"reward/mean": value} for value in values]
