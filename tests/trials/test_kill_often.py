"""Kills a run of a small model with SIGKILL at a hundred places, resumes it, and compares every bit. One process with
jrl imported, in which JAX has not started, is forked for every run: it would take longer to start than to run.

pytest -m slow tests/trials/test_kill_often.py
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from short_runs import metrics
from small_model import BIGRAM, part_in

from jrl.run.run_hash import run_fingerprint

pytestmark = pytest.mark.slow

SERVER = """
import json, os, sys
import announce
from jrl import api, cli, loop
announce.announce()
for line in sys.stdin:
    log, arguments = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(1, 0)
        os._exit(cli.main(arguments))
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
SMALL = [
    BIGRAM, "Online.prompts=4", "Online.samples=2", "Sampler.completion_length=4", "Checkpoint.every=2",
    "Log.samples=0", "Scoring.workers=1",
]  # fmt: skip
WARM = ["Config.stages=[@warm/Offline(), @Online()]", "warm/Offline.source=@Demonstrations()",
        "warm/Offline.objective=@SFT()", "warm/Offline.batch_size=2"]  # fmt: skip
EVAL = ["Config.eval=@Eval()", "Eval.prompts=4", "Eval.batch=4", "Data.held_out_every=5"]
KINDS = {
    "on policy": ["Online.steps=8"],
    "lag": ["Online.steps=8", "Online.lag=2", "GRPO.importance=@TruncatedImportance()"],
    "two stages": [*WARM, *EVAL, "warm/Offline.steps=3", "Online.steps=5", "Online.lag=1"],
}
# What the process is doing when it is killed, how often that is announced in a run, the longest wait after, and the
# share of the trials. Between an update and its save there is a step's end.
POINTS = [("save", 4, 0.25, 35), ("scoring", 5, 0.02, 20), ("compile", 3, 0.2, 12), ("update", 5, 0.03, 15),
          ("saved", 4, 0.02, 8), ("anywhere", 1, 2.0, 10)]  # fmt: skip


class Server:
    def __init__(self, part, folder):
        here = Path(__file__).parent
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (here, here.parent, here.parents[1])))}
        self.part, self.log = part, folder / "log"
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env=environment, cwd=here.parents[1],
        )  # fmt: skip

    def start(self, folder, kind, *options):
        """Begins to train and returns the process."""
        self.log.write_text("")
        command = ["train", "configs/tiny.gin", self.part, *SMALL, *KINDS[kind], "--run", str(folder), *options]
        self.process.stdin.write(json.dumps([str(self.log), command]) + "\n")
        return int(self.process.stdout.readline())

    def exit_code(self):
        return int(self.process.stdout.readline())

    def finish(self, folder, kind):
        self.start(folder, kind)
        assert self.exit_code() == 0, self.log.read_text()[-2000:]

    def kill_at(self, pid, doing, times, seconds):
        """Kills a process some time after it has said so often what it does, or has ended. Returns its exit code."""
        while psutil.pid_exists(pid) and self.log.read_text().count(f"NOW {doing}\n") < times:
            time.sleep(0.002)
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return self.exit_code()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    server = Server(part_in(folder), folder)
    yield server
    server.process.stdin.close()
    server.process.wait()
    server.process.stdout.close()


def test_a_run_that_is_killed_anywhere_resumes_to_the_same_bits(tmp_path, server, trials):
    """Once or twice each."""
    draw, whole, killed = random.Random(0), {}, 0
    for kind in KINDS:
        whole[kind] = tmp_path / f"whole {kind}"
        server.finish(whole[kind], kind)
    expected = {kind: (run_fingerprint(folder), metrics(folder)) for kind, folder in whole.items()}
    for trial in range(trials(3, 100)):
        folder, kind = tmp_path / f"run{trial}", draw.choice(list(KINDS))
        for _ in range(draw.randrange(1, 3)):
            doing, most, longest, _ = draw.choices(POINTS, [point[-1] for point in POINTS])[0]
            pid = server.start(folder, kind, *(["--no-compile-cache"] if doing == "compile" else []))
            times = 0 if doing == "anywhere" else draw.randrange(1, most + 1)
            code = server.kill_at(pid, doing, times, draw.uniform(0, longest))
            killed += code == -signal.SIGKILL
            assert code in (-signal.SIGKILL, 0), (trial, code, server.log.read_text()[-1000:])
        ended = (folder / "summary.json").exists()
        server.start(folder, kind)
        assert server.exit_code() == (5 if ended else 0), (trial, server.log.read_text()[-2000:])
        assert (run_fingerprint(folder), metrics(folder)) == expected[kind], (trial, kind, doing)
        shutil.rmtree(folder)
    assert killed >= trial
