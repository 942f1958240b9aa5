"""A progress bar for reading weights, and their name in messages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path


def reading_bar() -> Callable[[int, int], None] | None:
    """Returns a function of (bytes read, total bytes) that shows a progress bar; None if standard error is not a
    terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    from jrl.run.report.text import bar

    def show(done: int, total: int) -> None:
        end = "\n" if done >= total else ""
        print(f"\rreading {total / 1e9:.1f} GB of weights {bar(done, total)}", end=end, file=sys.stderr, flush=True)

    return show


def weights_of(source: Path, step: int) -> str:
    """Returns the name of weights in messages: by step for a run, by folder for a published model."""
    from jrl import paths

    return f"the weights of step {step}" if paths.exists(source / "manifest.json") else f"the weights of {source}"
