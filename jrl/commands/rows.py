"""Counts the rows of a data file on the terminal while it is opened."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator

from jrl.tasks.stopping import Stop, never

SHOWN_EVERY = 1000  # rows
START_OF_LINE = "\r\x1b[K"  # where the line is erased
QUIET_SECONDS = 1.0  # a file that opens sooner shows nothing


@contextlib.contextmanager
def counted_rows() -> Iterator[Stop]:
    """Gives a Stop that never stops and counts how often it is polled, about once for each row. The line is removed at
    the end. Shows nothing if standard error is not a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield never
        return
    polls, begun = itertools.count(1), time.monotonic()

    def poll() -> bool:
        if (count := next(polls)) % SHOWN_EVERY == 0 and time.monotonic() - begun > QUIET_SECONDS:
            print(f"{START_OF_LINE}reading data: {count:,} rows", end="", file=sys.stderr, flush=True)
        return False

    try:
        yield poll
    finally:
        print(START_OF_LINE, end="", file=sys.stderr, flush=True)
