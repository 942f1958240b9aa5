"""Secrets that are planted in the environment of a run, and of one that fails, appear in none of its files or messages.

pytest -m slow tests/trials/test_secrets.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SERVICES = ("HF", "WANDB", "OPENAI", "AWS", "GOOGLE", "GITHUB", "JUDGE", "MY", "JRL", "ANY")
NAMES = [f"{service}_{kind}" for service in SERVICES for kind in ("TOKEN", "API_KEY", "SECRET", "PASSWORD")]
SECRETS = {name: f"canary-{place:02d}-{name[::-1].lower()}" for place, name in enumerate(NAMES)}
TINY = ["Online.steps=2", "Online.prompts=4", "Online.samples=2", "Decoder.layers=1", "Checkpoint.every=1"]
RAISES = "def raises(completion, example):\n    raise RuntimeError(completion)\nVERIFIERS = {'raises': raises}\n"


@pytest.mark.parametrize("fails", [False, True])
def test_no_secret_of_the_environment_is_written(tmp_path, trials, fails):
    trials(len(SECRETS))
    (tmp_path / "raises.py").write_text(RAISES)
    more = [f"parts=['{tmp_path}/raises.py']", "Scoring.verifiers=[@raises()]"] if fails else []
    done = subprocess.run(
        [sys.executable, "-m", "jrl.cli", "train", "configs/tiny.gin", *TINY, *more, "--run", str(tmp_path / "run")],
        capture_output=True, cwd=ROOT, env={**os.environ, **SECRETS},
    )  # fmt: skip
    assert (done.returncode == 0) != fails, done.stderr[-1000:]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert fails or len(files) > 5
    written = {"output": done.stdout + done.stderr} | {str(path): path.read_bytes() for path in files}
    assert [
        (name, where) for name, value in SECRETS.items() for where, data in written.items() if value.encode() in data
    ] == []
