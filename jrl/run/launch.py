"""Starts the processes of a run on this machine, and ends with their exit code. No JAX."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jrl.exit_codes import DONE, LOST

LEFT_SECONDS = 60.0  # how long the others may take to end after the first has ended with an error
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def launch(arguments: Sequence[str], count: int) -> int:
    """Runs `jrl train ARGUMENTS` in `count` processes of this machine and returns their exit code.

    Signals are forwarded to the processes. If their exit codes differ, the result is the first that is not 0 and does
    not merely say that another process is gone; a process that a signal has killed counts as gone.
    """
    port = free_port()
    command = [sys.executable, "-m", "jrl.cli", "train", *arguments, "--coordinator", f"127.0.0.1:{port}",
               "--process-count", str(count)]  # fmt: skip
    children: list[subprocess.Popen] = []
    with forwarded(children):
        try:
            for index in range(count):
                child = [*command, "--process-index", str(index)]
                children.append(subprocess.Popen(child, preexec_fn=stop_with_parent))
            return exit_code(wait(children))
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
            for child in children:
                child.wait()


def wait(children: Sequence[subprocess.Popen]) -> list[int]:
    """Returns the exit codes of all processes. Those that outlive a failed one for LEFT_SECONDS are killed."""
    deadline = None
    while any(child.poll() is None for child in children):
        if deadline is None and any(child.poll() for child in children):
            deadline = time.monotonic() + LEFT_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            for child in children:
                if child.poll() is None:
                    child.kill()
        time.sleep(0.05)
    return [child.returncode for child in children]


def exit_code(codes: Sequence[int]) -> int:
    """Returns the exit code of a run, given those of its processes."""
    codes = [LOST if code < 0 else code for code in codes]
    causes = [code for code in codes if code not in (DONE, LOST)]
    return next(iter(causes), LOST if LOST in codes else DONE)


def stop_with_parent() -> None:
    """Has Linux send this process SIGTERM when its parent dies, however it dies: the run then saves and stops."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def forwarded(children: Sequence[subprocess.Popen]) -> Iterator[None]:
    """Forwards signals that ask this process to end to its children. A Ctrl-C reaches them from the terminal."""

    def forward(number: int, frame: Any) -> None:
        if number == signal.SIGINT and sys.stdin is not None and sys.stdin.isatty():
            return
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    """Returns an unused port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
