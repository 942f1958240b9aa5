"""Counts the rows of a data file on the terminal while it is opened."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from jrl.tasks.stopping import Stop, never

START_OF_LINE = "\r\x1b[K"  # where the line is erased
REDRAW_SECONDS = 0.5  # a file that opens sooner shows nothing


@contextlib.contextmanager
def counted_rows() -> Iterator[Stop]:
    """Gives a Stop that never stops and counts how often it is polled, about once for each row. The line is removed at
    the end. Shows nothing if standard error is not a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield never
        return
    from jrl.run.data import showing_rows

    drawn = time.monotonic()

    def draw(phase: str, done: int) -> None:
        nonlocal drawn
        if (now := time.monotonic()) - drawn >= REDRAW_SECONDS:
            drawn = now
            print(f"{START_OF_LINE}reading {phase}: {done:,} rows", end="", file=sys.stderr, flush=True)

    try:
        yield showing_rows(never, draw)
    finally:
        print(START_OF_LINE, end="", file=sys.stderr, flush=True)
