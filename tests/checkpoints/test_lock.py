from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jrl.run.checkpoints.lock import RunIsHeld, hold_run

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
