"""Kills a run of configs/tiny.gin in a bucket with SIGKILL at 10 points, with 5 % of the requests failing or late,
resumes it, on another machine or on the same, and compares every bit with a local run. Run by hand:

pytest -m slow tests/trials/test_kill_bucket.py -s
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from bucket_stand_in import Store, serving

pytestmark = pytest.mark.slow


def command(*arguments):
    return [sys.executable, "-m", "jrl.cli", *map(str, arguments)]


def fingerprint(run, environment=None):
    done = subprocess.run(command("fingerprint", run, "--json"), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    subprocess.run(command("train", "tiny", "--run", folder), check=True, capture_output=True)
    return fingerprint(folder)


@pytest.mark.parametrize("trial", range(10))
def test_a_killed_run_in_a_bucket_equals_a_local_one(tmp_path, local, trial):
    chance, store = random.Random(trial), Store(fails=0.05, seed=trial, delay_seconds=0.5)
    with serving(store) as endpoint:
        machine = lambda name: {
            **os.environ,
            "STORAGE_EMULATOR_HOST": endpoint,
            "JRL_BUCKET_COPIES": str(tmp_path / name),
        }
        train = command("train", "tiny", "--run", "gs://bucket/runs/tiny")
        process = subprocess.Popen(train, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=machine("a"))
        wanted = chance.randint(5, 110)  # requests; a run has about 140
        while len(store.requests) < wanted and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.stderr.read()
        assert process.wait() == -signal.SIGKILL, "the run had ended before it was killed"
        committed = [name for _, name in store.objects if "/checkpoints/" in name and "manifest.json" in name]
        done = subprocess.run(train, capture_output=True, text=True, env=machine("a" if trial % 5 else "b"))
        assert done.returncode == 0, done.stderr[-2000:]
        print(f"trial {trial}: killed after {wanted} requests with {len(committed)} checkpoints in the bucket")
        assert fingerprint("gs://bucket/runs/tiny", machine("reader")) == local
