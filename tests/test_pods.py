"""Runs of several processes on this machine: the same tokens and metrics as one process on the same mesh."""

import json
import subprocess
import sys

import numpy as np
import pytest
import short_runs

from jrl.run.report.rollouts import read_rollouts

ONE_SMALL = [
    "Config.mesh=@MeshShape()",
    "MeshShape.data=4",
    "Decoder.layers=1",
    "Decoder.width=16",
    "Decoder.mlp_width=32",
    "Online.prompts=4",
    "Online.samples=4",
    "Online.steps=3",
    "Checkpoint.every=2",
    "Scoring.workers=1",
]


def command(folder, *bindings, processes=2, devices=2, settings=ONE_SMALL):
    named = {binding.partition("=")[0]: binding for binding in [*settings, *bindings]}
    return [sys.executable, "-m", "jrl.cli", "train", "configs/tiny.gin", *named.values(), "--run", str(folder),
            "--processes", str(processes), "--devices", str(devices)]  # fmt: skip


def train(folder, *bindings, code=0, **options):
    done = subprocess.run(command(folder, *bindings, **options), capture_output=True, text=True, timeout=280)
    assert done.returncode == code, done.stderr
    return done


def metrics(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in row.items() if not name.startswith(("time/", "host/"))} for row in rows]


def assert_same(folder, other):
    """Holds two runs to the same tokens, and to metrics that differ by rounding."""
    ours, theirs = read_rollouts(folder / "rollouts"), read_rollouts(other / "rollouts")
    for name in ("tokens", "length", "reward", "uid"):
        np.testing.assert_array_equal(ours[name], theirs[name])
    assert ours["completion"] == theirs["completion"]
    assert len(metrics(folder)) == len(metrics(other))
    for a, b in zip(metrics(folder), metrics(other)):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-6), (a["step"], name)


def test_two_processes_train_as_one_does_on_the_same_mesh_and_one_goes_on(tmp_path):
    train(tmp_path / "two")
    short_runs.run(ONE_SMALL, tmp_path / "one")
    assert_same(tmp_path / "two", tmp_path / "one")
    short_runs.run(ONE_SMALL, tmp_path / "two", "Online.steps=4")
    short_runs.run(ONE_SMALL, tmp_path / "one", "Online.steps=4")
    assert_same(tmp_path / "two", tmp_path / "one")
