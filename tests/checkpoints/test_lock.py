from __future__ import annotations

import fcntl
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jrl.run.checkpoints.lock import RunIsHeld, hold_run, holder_of

HOLD = """
import sys, time
from jrl.run.checkpoints.lock import hold_run
hold_run(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_holder_is_refused_naming_the_first(tmp_path):
    lock = hold_run(tmp_path)
    with pytest.raises(RunIsHeld, match=f"is held by process {os.getpid()} on .* since 20"):
        hold_run(tmp_path)
    lock.release()
    lock.release()
    hold_run(tmp_path).release()


def test_a_full_disk_is_named_and_leaves_the_folder_to_the_next_try(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large.*lock"):
            hold_run(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    hold_run(tmp_path).release()


def test_a_dead_holder_holds_nothing(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert process.stdout.readline() == "held\n"
    with pytest.raises(RunIsHeld, match=f"process {process.pid} "):
        hold_run(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    hold_run(tmp_path).release()


# A process that takes and releases the lock of a folder as it is told to, a line each, and says what came of it.
TAKER = """
import sys
from jrl.run.checkpoints.lock import RunIsHeld, hold_run
lock = None
for line in sys.stdin:
    try:
        if line.startswith("take"):
            lock = hold_run(line.split()[1])
        else:
            lock.release()
            lock = None
        print("done", flush=True)
    except RunIsHeld as error:
        print("held by", error.holder.get("pid", "somebody"), flush=True)
"""


class Taker:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def ask(self, line):
        self.process.stdin.write(f"{line}\n")
        return self.process.stdout.readline().strip()

    def end(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def test_of_many_that_take_a_folder_one_has_it_and_a_dead_or_stopped_one_is_as_good_as_its_word(tmp_path, trials):
    """In each trial some processes take one folder at the same time; the one that has it is then killed, or stopped
    for a while, or releases it."""
    draw, takers = random.Random(0), [Taker() for _ in range(3)]
    for trial in range(trials(6, 120)):
        folder = tmp_path / f"run{trial}"
        chosen, answers = draw.sample(range(3), draw.randrange(1, 4)), {}
        threads = [
            threading.Thread(target=lambda i=i, to=answers, at=folder: to.update({i: takers[i].ask(f"take {at}")}))
            for i in chosen
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (holder,) = [i for i in chosen if answers[i] == "done"]
        pid = takers[holder].process.pid
        assert all(answers[i] in (f"held by {pid}", "held by somebody") for i in chosen if i != holder), answers
        others = [taker for i, taker in enumerate(takers) if i != holder]
        assert draw.choice(others).ask(f"take {folder}") == f"held by {pid}"
        assert holder_of(folder)["pid"] == pid
        how = draw.choice(["killed", "stopped", "released"])
        if how == "stopped":
            os.kill(pid, signal.SIGSTOP)
            assert draw.choice(others).ask(f"take {folder}") == f"held by {pid}"
            os.kill(pid, signal.SIGCONT)
            assert draw.choice(others).ask(f"take {folder}") == f"held by {pid}"
        if how == "killed":
            takers[holder].end()
            takers[holder] = Taker()
        else:
            assert takers[holder].ask("release") == "done"
        assert holder_of(folder) is None
        next_one = draw.choice(takers)
        assert next_one.ask(f"take {folder}") == "done" and next_one.ask("release") == "done"
    for taker in takers:
        taker.end()


def test_a_lock_file_of_nonsense_still_refuses(tmp_path):
    lock = hold_run(tmp_path)
    (tmp_path / "lock").write_bytes(b"\xff{")
    with pytest.raises(RunIsHeld, match="held by another process"):
        hold_run(tmp_path)
    lock.release()


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    """A refused run removes its folder between the other's opening of the file and its locking it."""
    flock, seen = fcntl.flock, []

    def remove_first(descriptor, operation):
        if not seen:
            (tmp_path / "lock").unlink()
        seen.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    lock = hold_run(tmp_path)
    with pytest.raises(RunIsHeld):
        hold_run(tmp_path)
    lock.release()
