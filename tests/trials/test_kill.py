"""Kills a run of configs/tiny.gin with SIGKILL at 12 points, resumes it, and compares every bit. Run by hand:

pytest -m slow tests/trials/test_kill.py -s
"""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# What the process is doing when it is killed, how many times that is announced before, and the longest wait after.
POINTS = [
    ("save", 1, 0.05), ("save", 2, 0.15), ("save", 4, 0.3),
    ("scoring", 2, 0.01), ("scoring", 9, 0.01), ("scoring", 21, 0.02),
    ("compile", 2, 0.3), ("compile", 7, 1.0),
    ("anywhere", 1, 1.0), ("anywhere", 8, 0.3), ("anywhere", 15, 0.3), ("anywhere", 27, 0.05),
]  # fmt: skip


def command(folder, lag, cached, config="configs/tiny.gin"):
    cache = [] if cached else ["--no-compile-cache"]
    trial = Path(__file__).with_name("announce.py")
    arguments = ["train", config, f"Online.lag={lag}", "--run", str(folder)]
    return [sys.executable, str(trial), *arguments, *cache]


def finish(folder, lag, config="configs/tiny.gin"):
    done = subprocess.run(command(folder, lag, True, config), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def kill_at(folder, lag, doing, times, longest, seed, config="configs/tiny.gin", number=signal.SIGKILL):
    """Starts a run and sends it a signal while it is `doing`, the `times`-th time; SIGTERM has it save and leave with
    code 75. Returns the last step it had written."""
    process = subprocess.Popen(
        command(folder, lag, doing != "compile", config), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    phase = "scoring" if doing == "anywhere" else doing
    for line in process.stderr:
        if line.strip() == f"NOW {phase}":
            times -= 1
            if times == 0:
                break
    time.sleep(random.Random(seed).uniform(0, longest))
    alive = process.poll() is None
    process.send_signal(number)
    said = process.stderr.read()
    ended = -signal.SIGKILL if number == signal.SIGKILL else 75
    assert process.wait() == ended and alive, f"the process had ended before it was killed: {said[-500:]}"
    metrics = folder / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def contents(folder):
    """Returns (fingerprint, metrics table) of a finished run."""
    done = subprocess.run(
        [sys.executable, "-m", "jrl.cli", "fingerprint", str(folder), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return json.loads(done.stdout), [
        {name: value for name, value in row.items() if not name.startswith(("time/", "host/"))} for row in rows
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folders = {lag: tmp_path_factory.mktemp(f"whole{lag}") for lag in (0, 1)}
    for lag, folder in folders.items():
        finish(folder, lag)
    return {lag: contents(folder) for lag, folder in folders.items()}


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("doing,times,longest", POINTS)
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, uninterrupted, lag, doing, times, longest):
    rows = kill_at(tmp_path, lag, doing, times, longest, seed=f"{doing}{times}{lag}")
    finish(tmp_path, lag)
    fingerprint, table = contents(tmp_path)
    print(f"lag {lag}: killed in {doing} with {rows} of 30 rows written; total {fingerprint['total'][:12]}")
    assert fingerprint == uninterrupted[lag][0]
    assert table == uninterrupted[lag][1]


@pytest.mark.parametrize("doing,times,longest", POINTS)
def test_a_run_that_is_asked_to_stop_saves_and_resumes_to_the_same_bits(tmp_path, uninterrupted, doing, times, longest):
    kill_at(tmp_path, 0, doing, times, longest, seed=f"{doing}{times}", number=signal.SIGTERM)
    finish(tmp_path, 0)
    fingerprint, table = contents(tmp_path)
    assert fingerprint == uninterrupted[0][0]
    assert table == uninterrupted[0][1]
