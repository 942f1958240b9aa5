"""How a run is asked to stop: SIGTERM or Ctrl-C saves and stops, a second Ctrl-C leaves at once. No JAX."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

INTERRUPTED = 130  # exit code of a process that Ctrl-C ended
_SHOW_CURSOR = b"\x1b[?25h"  # a live display hides it


@contextlib.contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Inside, SIGTERM, a closed terminal and the first Ctrl-C ask the run to save and stop; a second Ctrl-C interrupts
    it at once.

    Only the main thread can do this; elsewhere signals stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # a closed terminal; `nohup` has it ignored
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def leave_on_second_interrupt() -> Iterator[None]:
    """Inside, a second Ctrl-C ends this process at once, with a message, whatever the main thread is doing.

    Python runs signal handlers between two instructions of the main thread, which may sit in a compilation for a
    minute. The interpreter's own C handler also writes the signal's number to a descriptor, and a thread can read that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        interrupts = 0
        while numbers := os.read(reader, 64):
            interrupts += numbers.count(signal.SIGINT)
            if interrupts > 1:
                _say("left at once; the last checkpoint is good, and the same command goes on from it", cursor=True)
                os._exit(INTERRUPTED)
            _say("asked to stop: saving after this step. Ctrl-C again leaves at once, without saving")

    watcher = threading.Thread(target=watch, name="jrl-interrupts", daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        watcher.join()
        os.close(reader)


def _say(text: str, *, cursor: bool = False) -> None:
    """Writes past Python's streams, whose locks the main thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, (_SHOW_CURSOR if cursor and sys.stderr.isatty() else b"") + f"\njrl: {text}\n".encode())
