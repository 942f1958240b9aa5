"""Finds a process of a run that is gone or does not answer, and ends this one with a message that names it.

Every process writes a beat a second: a number, the step and what it does. A beat that stands still for LOST_SECONDS
belongs to a process that was killed or stopped. The main thread may wait for that process in a collective, which has no
end, so a thread of its own looks, says who is gone and where everyone was, and ends the process with exit code 76.
A step that takes long is no reason to end; where every process is, is told once.
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
LOST_SECONDS = 20.0  # without a beat of a process it counts as gone; a busy machine may be late by seconds
GRACE_SECONDS = 15.0  # how long the main thread may take to end by itself once another process has failed
SIGABRT = 6


class Beats:
    """When each process was last heard from."""

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers: dict[int, int] = {}
        self._heard = dict.fromkeys(range(count), clock())
        self.places: dict[int, str] = {}
        self.answered = clock()  # the coordination service

    def hear(self, found: dict[str, bytes]) -> None:
        """Takes in the beats of all processes, by key."""
        self.answered = now = self._clock()
        for key, value in found.items():
            index, beat = int(key.rsplit("/", 1)[-1]), decode(value)
            if self._numbers.get(index) != beat["number"]:
                self._numbers[index], self._heard[index] = beat["number"], now
                self.places[index] = beat["place"]

    def lost(self, mine: int) -> list[int]:
        """Returns the processes that are gone or do not answer."""
        now = self._clock()
        if now - self.answered > LOST_SECONDS:
            return [0] if mine else []  # process 0 holds the coordination service: it has itself been paused
        return [i for i, heard in self._heard.items() if i != mine and now - heard > LOST_SECONDS]

    def lines(self, processes: Processes) -> str:
        """Returns where every process was when it was last heard from."""
        now = self._clock()
        return "\n".join(
            f"  {processes.name(i)}: {self.places.get(i, 'starting')}, heard from {now - self._heard[i]:.0f} s ago"
            for i in range(processes.count)
        )


def lost_message(processes: Processes, beats: Beats, lost: list[int]) -> str:
    names = ", ".join(processes.name(i) for i in lost)
    verb = "are" if len(lost) > 1 else "is"
    return f"{names} {verb} gone or does not answer. {RESTART}\n{beats.lines(processes)}"


def aborted_message(lines: str) -> str:
    """Returns what process 0, which holds the coordination service, says where it is aborted and nobody is lost."""
    return (
        "this process was aborted, and no other one is missing. The lines above say why. One reason is a "
        f"--process-index that was started twice; start each once. {RESTART}\n{lines}"
    )


@contextlib.contextmanager
def watching(processes: Processes, say: Callable[[str], None]) -> Iterator[Beats | None]:
    """Inside, this process ends with exit code 76 where another one is gone, and with that one's code where it has
    failed and the main thread does not end by itself.

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
            with contextlib.suppress(Exception):  # `answered` stands still where the service is gone
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
        told = None  # the step after which the run was late and this was said
        while not ended.wait(BEAT_SECONDS):
            if (
                processes.writer
                and told != processes.status.step
                and (waited := processes.status.overdue()) is not None
            ):
                told = processes.status.step
                say(f"no step has ended for {waited:.0f} s, which is long for this run:\n{beats.lines(processes)}")
            if lost := beats.lost(processes.index):
                say(lost_message(processes, beats, lost))
                leave(LOST)

    def aborted() -> None:  # JAX's client aborts its process at once when the coordination service goes away
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
    """Ends the process at once: its main thread may wait for a device that never answers."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def at_abort(act: Callable[[], NoReturn]) -> Iterator[None]:
    """Inside, an abort of a native thread calls `act` in place of ending the process by SIGABRT. Python's own signal
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
