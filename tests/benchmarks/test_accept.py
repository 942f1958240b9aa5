"""The acceptance of a new machine: what it reports of checks that pass, fail and do not apply."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.accept import Finding, Place, check_kernels, examine, page, read_rows


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


@pytest.mark.slow
def test_the_whole_acceptance_on_virtual_devices(tmp_path):
    script, out = Path(__file__).parents[2] / "tpu" / "accept.sh", tmp_path / "out"
    environment = {"PYTHON": sys.executable}
    done = subprocess.run(["env", *(f"{k}={v}" for k, v in environment.items()), script, out, "--devices", "2"],
                          capture_output=True, text=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.loads((out / "accept.json").read_text())["findings"]
    assert len(findings) == 8 and all(found["good"] is not False for found in findings)
    assert (out / "accept.md").read_text().count("| ok |") == sum(found["good"] is True for found in findings)
