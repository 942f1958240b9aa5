"""docs/published-models.md, from a published folder to a published folder, run from its own text.

pytest -m slow tests/trials/test_walkthrough.py -s

Needs the [reference] extra. It runs the page's code blocks as a reader would paste them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def blocks() -> dict[str, str]:
    """Returns the page's code: "make", "commands", "use"."""
    text = (ROOT / "docs/published-models.md").read_text(encoding="utf-8")
    actual = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    assert [kind for kind, _ in actual] == ["python", "bash", "python"]
    return dict(zip(("make", "commands", "use"), (code for _, code in actual)))


def test_a_folder_of_transformers_is_trained_exported_and_goes_on_there(tmp_path):
    pytest.importorskip("peft")
    code = blocks()
    (tmp_path / "make.py").write_text(code["make"])
    (tmp_path / "use.py").write_text(code["use"])
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "jrl").write_text(f'#!/bin/sh\nexec {sys.executable} -m jrl.cli "$@"\n')
    (bin_folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for script in bin_folder.iterdir():
        script.chmod(0o755)
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
                   "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "HF_HUB_OFFLINE": "1"}  # fmt: skip
    start = time.monotonic()
    for command in ["set -e\n" + code["commands"], "python use.py"]:
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        print(done.stdout)
    print(f"{time.monotonic() - start:.0f} s")
    *answers, last = re.split(r"\n(?=\d+ \+|logits)", done.stdout.strip())
    assert len(answers) == 2, done.stdout
    assert all(re.fullmatch(r"\d+ \+ \d+ = \d+\n#### \d+", answer) for answer in answers), done.stdout
    assert float(re.fullmatch(r"logits differ by (\S+)", last)[1]) <= 2e-4
    for name in ("try", "try-lora"):
        summary = json.loads((tmp_path / "runs" / name / "summary.json").read_text())
        before, after = (100 * summary["eval"][place]["mean"] for place in ("before_rl", "after_rl"))
        print(f"{name}: {before:.1f} % before RL, {after:.1f} % after, {summary['seconds']['total']:.0f} s")
        assert after > before + (10 if name == "try" else 0)
