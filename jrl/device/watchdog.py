"""Detects a process of a run that is gone or does not answer, and ends this one with a message that names it.

Every process writes a heartbeat each second: a number, its step and what it is doing. If the number does not change for
LOST_SECONDS, the process was killed or stopped. The main thread may wait for it forever in a collective, so a separate
thread checks, shows which process is gone and what all were doing, and ends the process with exit code 76. A slow step
does not end the run; what every process is doing is shown once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from jrl.device.processes import RESTART, Processes, decode, encode
from jrl.exit_codes import LOST

BEAT_SECONDS = 1.0
LOST_SECONDS = 20.0  # a process without a heartbeat for this long is gone; on a busy machine they are seconds late
GRACE_SECONDS = 15.0  # for the main thread to end by itself once another process has failed
SIGABRT = 6


class Beats:
    """The last heartbeat of each process."""

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers: dict[int, int] = {}
        self._heard = dict.fromkeys(range(count), clock())
        self.places: dict[int, str] = {}
        self.answered = clock()  # when the coordination service last answered

    def hear(self, found: dict[str, bytes]) -> None:
        """Records the heartbeats of all processes, by key."""
        now = self._clock()
        if now - self.answered > LOST_SECONDS:  # this process was paused, and perhaps the others too
            self._heard = dict.fromkeys(self._heard, now)
        self.answered = now
        for key, value in found.items():
            index, beat = int(key.rsplit("/", 1)[-1]), decode(value)
            if self._numbers.get(index) != beat["number"]:
                self._numbers[index], self._heard[index] = beat["number"], now
                self.places[index] = beat["place"]

    def lost(self, mine: int) -> list[int]:
        """Returns the processes that are gone or do not answer."""
        now = self._clock()
        if now - self.answered > LOST_SECONDS:
            return [0] if mine else []  # process 0 holds the service, so it was itself paused
        return [i for i, heard in self._heard.items() if i != mine and now - heard > LOST_SECONDS]

    def lines(self, processes: Processes) -> str:
        """Returns what every process was doing at its last heartbeat."""
        now = self._clock()
        return "\n".join(
            f"  {processes.name(i)}: {self.places.get(i, 'starting')}, heard from {now - self._heard[i]:.0f} s ago"
            for i in range(processes.count)
        )


def lost_message(processes: Processes, beats: Beats, lost: list[int]) -> str:
    names = ", ".join(processes.name(i) for i in lost)
    verbs = "are gone or do" if len(lost) > 1 else "is gone or does"
    return f"{names} {verbs} not answer. {RESTART}\n{beats.lines(processes)}"


def aborted_message(lines: str) -> str:
    """Returns the message of process 0, which holds the coordination service, if it is aborted and none is lost."""
    return (
        "this process was aborted, and no other one is missing. The lines above say why. One reason is a "
        f"--process-index that was started twice; start each once. Another is that it was paused. {RESTART}\n{lines}"
    )


@contextlib.contextmanager
def watching(processes: Processes, say: Callable[[str], None]) -> Iterator[Beats | None]:
    """Inside, this process ends with exit code 76 if another one is gone. If another one has failed and the main thread
    does not end by itself, this process ends with the other's exit code.

    Args:
      say: shows a message; called from any thread.
    """
    if processes.store is None:
        yield None
        return
    store, beats, ended = processes.store, Beats(processes.count), threading.Event()

    def beat() -> None:
        number = 0
        while not ended.wait(BEAT_SECONDS):
            number += 1
            with contextlib.suppress(Exception):  # `answered` is not updated if the service is gone
                store.put(f"beat/{processes.index}", encode({"number": number, "place": str(processes.status)}))
                beats.hear(store.list("beat"))
                if (failure := processes.failure()) is not None:
                    if not ended.wait(GRACE_SECONDS):
                        say(str(failure))
                        with contextlib.suppress(Exception):
                            processes.acknowledge()
                        leave(failure.code)
                    return

    def watch() -> None:
        reported = None  # the last step after which a late step was reported
        while not ended.wait(BEAT_SECONDS):
            if (
                processes.writer
                and reported != processes.status.step
                and (waited := processes.status.overdue()) is not None
            ):
                reported = processes.status.step
                say(f"no step has ended for {waited:.0f} s, which is long for this run:\n{beats.lines(processes)}")
            if lost := beats.lost(processes.index):
                say(lost_message(processes, beats, lost))
                leave(LOST)

    def aborted() -> None:  # JAX's client aborts its process as soon as the coordination service is gone
        if (failure := processes.ended_by) is not None:
            say(str(failure))
            leave(failure.code)
        lost = beats.lost(processes.index)
        if processes.writer and not lost:
            say(aborted_message(beats.lines(processes)))
        else:
            say(lost_message(processes, beats, lost or [0]))
        leave(LOST)

    threads = [threading.Thread(target=run, name=f"jrl-{run.__name__}", daemon=True) for run in (beat, watch)]
    with at_abort(aborted):
        for thread in threads:
            thread.start()
        try:
            yield beats
        finally:
            ended.set()


def leave(code: int) -> NoReturn:
    """Ends the process at once, since its main thread may wait for a device that never answers."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def at_abort(act: Callable[[], NoReturn]) -> Iterator[None]:
    """Inside, an abort in a native thread calls `act` instead of ending the process by SIGABRT. Python's signal
    handlers run in the main thread, which is too late for an abort in another."""
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: act())
    before = libc.signal(SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(SIGABRT, before)
