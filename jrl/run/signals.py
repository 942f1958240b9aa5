"""How a run is asked to stop: SIGTERM or Ctrl-C saves and stops, a second Ctrl-C leaves at once. No JAX."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from jrl.exit_codes import INTERRUPTED

STOPPING = "Stopping: ending this step and saving. Press Ctrl-C{again} to leave now without saving."
LEFT = "Left without saving. Run the same command to continue from the last checkpoint."
_SHOW_CURSOR = b"\x1b[?25h"  # a live display hides it
_SAY_SECONDS = 1.0  # how long a process that ends waits for its last message
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A process has one handler of a signal: what the open blocks of `stop_on_signals` share
_open_blocks: list[tuple[threading.Event, Callable[[str], None] | None]] = []
_handlers_before: dict[int, Any] = {}


def write_past_streams(text: str) -> None:
    """Writes a message to standard error past Python's streams, whose locks the main thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"\njrl: {text}\n".encode())


class StopRequest(threading.Event):
    """Set when a run should save and stop. `say(text)` tells the person at the terminal: on standard error, or through
    the display while one is open."""

    def __init__(self) -> None:
        super().__init__()
        self._say: Callable[[str], None] = write_past_streams

    def say(self, text: str) -> None:
        self._say(text)

    @contextlib.contextmanager
    def routed_to(self, say: Callable[[str], None]) -> Iterator[None]:
        """Shows messages through `say`: a display's `notice`, which any thread may call."""
        before, self._say = self._say, say
        try:
            yield
        finally:
            self._say = before


@contextlib.contextmanager
def stop_on_signals(stop: threading.Event, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Inside the block, SIGTERM, a closed terminal and the first Ctrl-C ask the run to save and stop; a second Ctrl-C
    interrupts it at once.

    Only the main thread can do this; elsewhere signals stay as they are. Blocks may end in any order, as those of two
    runs do whose steps are read in turn: signals ask all that are open, and the last to end gives the signals back.

    Args:
      say: shows, in a thread of its own, that the run is stopping. None: leave_on_second_interrupt does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    block = (stop, say)
    _open_blocks.append(block)  # before a handler looks for it
    try:
        _install()
        yield
    finally:
        _open_blocks.remove(block)
        if not _open_blocks and threading.current_thread() is threading.main_thread():  # else the next signal does it
            _give_back()


def _install() -> None:
    """Installs `_ask`, where it is not installed, and keeps the handlers that were."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # a closed terminal; `nohup` has it ignored
        numbers.append(signal.SIGHUP)
    for number in numbers:
        if (before := signal.getsignal(number)) is not _ask:
            _handlers_before[number] = before  # first: the next instruction may be interrupted when it is done
            signal.signal(number, _ask)


def _ask(number: int, frame: Any) -> None:
    if not _open_blocks:
        _give_back()
        signal.raise_signal(number)
        return
    unasked = [(stop, say) for stop, say in _open_blocks if not stop.is_set()]
    if not unasked and number == signal.SIGINT:
        raise KeyboardInterrupt
    for stop, say in unasked:
        stop.set()
        if say is not None:
            in_thread(say, stopping(number))


def _give_back() -> None:
    for number, handler in _handlers_before.items():
        signal.signal(number, handler)
    _handlers_before.clear()


@contextlib.contextmanager
def leave_on_second_interrupt(say: Callable[[str], None] = write_past_streams) -> Iterator[None]:
    """Inside the block, a Ctrl-C after a request to stop ends this process at once, with a message, whatever the main
    thread is doing.

    Python runs signal handlers between two instructions of the main thread, which may sit in a compilation for a
    minute. The interpreter's own C handler also writes the signal's number to a descriptor, and a thread can read that.

    Args:
      say: shows, in a thread of its own, that the run is stopping.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    speakers: list[threading.Thread] = []

    def watch() -> None:
        asked = False
        while numbers := os.read(reader, 64):
            for number in filter(_STOP_SIGNALS.__contains__, numbers):
                if asked and number == signal.SIGINT:
                    say_all(speakers)  # so that the last line is that it left
                    leave()
                if not asked:
                    speakers.append(in_thread(say, stopping(number)))
                asked = True

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
        say_all(speakers)


def say_all(speakers: Iterable[threading.Thread]) -> None:
    """Waits until messages are said, for a short time: a terminal may be stuck."""
    for thread in speakers:
        thread.join(_SAY_SECONDS)


def in_thread(say: Callable[[str], None], text: str) -> threading.Thread:
    """Says `text` in a new thread: neither a signal handler nor the watcher may wait for a lock or a terminal."""
    thread = threading.Thread(target=say, args=(text,), name="jrl-say", daemon=True)
    thread.start()
    return thread


def stopping(number: int) -> str:
    """Returns the message after the signal that asked a run to stop."""
    return STOPPING.format(again=" again" if number == signal.SIGINT else "")


def leave() -> NoReturn:
    """Ends the process with a message, and shows the cursor again, which a live display hides."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if os.isatty(descriptor):
                os.write(descriptor, _SHOW_CURSOR)
    write_past_streams(LEFT)
    os._exit(INTERRUPTED)
