"""Kills one process of two whose run is in a bucket, at 6 points, with 5 % of the requests failing or late, resumes the
run, on other machines or on the same, and compares every bit with a local run of two. Run by hand:

pytest -m slow tests/trials/test_kill_bucket_processes.py -s
"""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from bucket_stand_in import Store, serving
from test_kill_bucket import fingerprint
from test_pods import command

pytestmark = pytest.mark.slow

ADDRESS = "gs://bucket/runs/two"
AS_IN_TESTS = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JRL_START_SECONDS": "200"}
STEPS = "Online.steps=4"  # of about 400 requests


def train(folder, *bindings, environment=os.environ, processes=2):
    """Trains to the end. Returns what was said."""
    done = subprocess.run(command(folder, *bindings, processes=processes, devices=4 // processes), text=True,
                          capture_output=True, env={**environment, **AS_IN_TESTS})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr + done.stdout


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local") / "run"
    train(folder, STEPS)
    return fingerprint(folder)


def on_machine(endpoint, copies):
    return {**os.environ, "STORAGE_EMULATOR_HOST": endpoint, "JRL_BUCKET_COPIES": str(copies)}


def kill_one(process, index):
    """Kills a process that a launcher has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[index]), signal.SIGKILL)


@pytest.mark.parametrize("trial", range(6))
def test_a_killed_run_of_two_processes_in_a_bucket_equals_a_local_one(tmp_path, local, trial):
    store, wanted = (
        Store(fails=0.05, seed=trial, delay_seconds=0.3),
        random.Random(trial).randint(12, 350),
    )  # of 405 requests
    with serving(store) as endpoint:
        environment = on_machine(endpoint, tmp_path / "a") | AS_IN_TESTS
        process = subprocess.Popen(command(ADDRESS, STEPS), env=environment, text=True, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE)  # fmt: skip
        while len(store.requests) < wanted and process.poll() is None:
            time.sleep(0.005)
        kill_one(process, trial % 2)
        messages = process.stderr.read()
        assert process.wait() == 76 and f"process {trial % 2} (" in messages, messages[-2000:]
        committed = [name for _, name in store.objects if "/checkpoints/" in name and "manifest.json" in name]
        print(f"trial {trial}: killed after {wanted} requests with {len(committed)} checkpoints uploaded")
        said = train(ADDRESS, STEPS, environment=on_machine(endpoint, tmp_path / ("b" if trial % 3 == 2 else "a")))
        assert f"checkpoints are in {ADDRESS}" in said
        assert fingerprint(ADDRESS, on_machine(endpoint, tmp_path / "reader")) == local


def test_another_number_of_processes_goes_on_with_a_run_in_a_bucket(tmp_path):
    run = tmp_path / "run"
    with serving(Store(fails=0.05, delay_seconds=0.1)) as endpoint:
        for steps, processes in ((2, 2), (3, 1), (4, 2)):
            train(run, f"Online.steps={steps}", processes=processes)
            environment = on_machine(endpoint, tmp_path / f"copies of {processes}")
            train(ADDRESS, f"Online.steps={steps}", environment=environment, processes=processes)
            assert fingerprint(ADDRESS, environment) == fingerprint(run)
