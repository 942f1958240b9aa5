"""The acceptance of a new machine: what it reports of checks that pass, fail and do not apply."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_model import PLAIN_DECODER

from benchmarks.accept import Finding, Place, check_kernels, examine, main, page, read_rows


def test_a_check_that_fails_is_a_finding_and_the_others_go_on(tmp_path):
    def check_broken(place):
        raise RuntimeError("exit code 4: no | memory\nleft")

    def check_fine(place):
        return Finding("fine", True, "as it should be", {"seconds": 2.0})

    findings = examine(Place(tmp_path, None, "cpu"), [check_broken, check_fine, check_kernels])
    assert [found.good for found in findings] == [False, True, None]
    assert findings[0].name == "broken" and "exit code 4" in findings[0].text
    text = page({"platform": "cpu", "devices": 4}, findings)
    assert "| **failed** | broken | RuntimeError: exit code 4: no \\| memory left |" in text
    assert "| ok | fine |" in text and "| -- | kernels |" in text and "platform cpu, devices 4" in text


def test_a_command_that_fails_is_reported_with_its_last_words(tmp_path):
    with pytest.raises(RuntimeError, match=r"exit code 2: jrl: .*nothing-here"):
        Place(tmp_path, None, "cpu").jrl("data", "inspect", tmp_path / "nothing-here.jsonl")


def test_half_a_row_is_no_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_rows(path) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in read_rows(path)] == [1, 2]


def accept(out, *arguments):
    """Returns what tpu/accept.sh finds on two virtual devices."""
    script = Path(__file__).parents[2] / "tpu" / "accept.sh"
    done = subprocess.run([script, out, "--devices", "2", *arguments], env={**os.environ, "PYTHON": sys.executable},
                          capture_output=True, text=True, timeout=900)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.loads((out / "accept.json").read_text())["findings"]
    assert (out / "accept.md").read_text().count("| ok |") == sum(found["good"] is True for found in findings)
    # CPUs have no attention kernel of their own, and do not say how much memory they use.
    assert [found["name"] for found in findings if not found["good"]] == ["kernels", "memory"]
    assert all(found["good"] is not False for found in findings) and len(findings) == 8
    return {found["name"]: found["numbers"] for found in findings}


def test_every_check_of_the_acceptance_on_virtual_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # as the suite's own runs
    small = ["Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
             "Decoder.mlp_width=32", "Online.prompts=8", "Scoring.workers=1", *PLAIN_DECODER]  # fmt: skip
    numbers = accept(tmp_path / "out", "--steps", "6", "--rows", "8 rows", "update", "--bindings", *small)
    assert 3 <= numbers["kill and resume"]["killed_after"] <= 6
    assert numbers["memory"]["planned"] > 0 and {*numbers["speed"]} == {"8 rows", "update"}


@pytest.mark.slow
def test_the_whole_acceptance_on_virtual_devices(tmp_path):
    assert len(accept(tmp_path / "out")["speed"]) == 8


def test_a_run_too_short_to_be_killed_in_the_middle_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["accept", "--out", str(tmp_path / "out"), "--steps", "3"])
    with pytest.raises(SystemExit):
        main()
    assert "at least 4" in capsys.readouterr().err and not (tmp_path / "out").exists()
