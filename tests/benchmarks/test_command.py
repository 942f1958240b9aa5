"""The command, end to end on its smallest model: jrl alone, one run of each row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_every_row_of_sampling_and_learning_is_measured_and_written(tmp_path):
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "--out", str(out), "--only", "jrl", "--shape", "test", "--in-use"]
    parts = ["--what", "sampler", "update", "step", "start", "--repeats", "1"]
    done = subprocess.run([*command, *parts], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(out.read_text())["rows"]
    assert {"32 rows", "8 rows", "update", "step, fixed lengths", "step, skewed lengths", "start, cold"} <= set(rows)
    for name, row in rows.items():
        assert len(row["systems"]["jrl"]["seconds"]) == 1, name


def test_rows_that_are_not_named_are_not_measured(tmp_path):
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "--out", str(out), "--only", "jrl", "--shape", "test", "--in-use"]
    done = subprocess.run([*command, "--rows", "8 rows", "--repeats", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(json.loads(out.read_text())["rows"]) == {"8 rows"}


def test_a_name_of_no_row_is_an_error(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "--out", str(tmp_path / "figures.json"), "--only", "jrl"]
    more = ["--shape", "test", "--what", "update", "step", "--rows", "8 row", "16 rows"]
    done = subprocess.run([*command, *more], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "no row of update, step has '8 row' or '16 rows' in its name" in done.stderr


def test_another_checkout_is_measured_in_turn_and_does_the_same_work(tmp_path):
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "--out", str(out), "--only", "jrl", "--shape", "test", "--in-use"]
    here = Path(__file__).parents[2]
    more = ["--against", str(here), "--what", "sampler", "update", "--rows", "update", "--repeats", "1"]
    done = subprocess.run([*command, *more], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    systems = json.loads(out.read_text())["rows"]["update"]["systems"]
    assert set(systems) == {"jrl", "before"} and systems["before"]["agrees"]
