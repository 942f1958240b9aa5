"""A trace of a few steps, by JAX's profiler."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jrl import paths


class Steps(NamedTuple):
    """Steps of a run, both ends included, counted from 1."""

    first: int
    last: int


def parse_steps(text: str) -> Steps:
    """Returns the steps of a text such as 3:6. Raises ValueError with the expected form."""
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(
            f"--profile {text!r} names no steps; write FIRST:LAST, such as 3:6 for steps 3 to 6 of the run"
        )
    return Steps(int(match[1]), int(match[2]))


class Profile:
    """The trace of a run, which is written once. Without steps it does nothing."""

    def __init__(
        self,
        steps: Steps | None,
        folder: Path,
        say: Callable[[str], None],
        spent: Callable[[str], AbstractContextManager],
    ) -> None:
        """spent: counts time as that of a part (`RunClock.on`), so that no step includes the time of its trace."""
        self._steps, self._folder, self._say, self._spent = steps, folder, say, spent
        self._first: int | None = None  # the first step in the trace

    def before(self, step: int) -> None:
        """Starts the trace before its first step, or before the first of its steps that a resumed run does."""
        if self._steps is not None and self._first is None and self._steps.first <= step <= self._steps.last:
            with self._spent("trace"):
                paths.make_dir(self._folder)
                jax.profiler.start_trace(str(self._folder))
            self._first = step

    def after(self, step: int, result: Any) -> None:
        """Ends the trace after its last step, once that is computed.

        Args:
          result: an array that is ready when the step is.
        """
        if self._first is not None and self._steps is not None and step >= self._steps.last:
            with self._spent("trace"):
                jax.block_until_ready(result)
            self._end(step)

    def close(self, done: int) -> None:
        """Ends a trace whose last step was not reached; says so if none of its steps was."""
        if self._first is not None and self._steps is not None:
            self._end(done)
        elif self._steps is not None:
            self._say(
                f"--profile {self._steps.first}:{self._steps.last}: none of these steps was done by this start of the "
                f"run, which ended after step {done}; nothing was traced"
            )
            self._steps = None

    def _end(self, step: int) -> None:
        with self._spent("trace"):
            jax.profiler.stop_trace()
        self._steps, traced = None, f"step {step}" if step == self._first else f"steps {self._first} to {step}"
        self._say(
            f"The trace of {traced} is in {self._folder}. Open it with `xprof --port 8791 {self._folder}` or "
            "TensorBoard's profile plugin (pip install xprof), or drop its .trace.json.gz on ui.perfetto.dev"
        )


def profile_folder(run: Path, index: int, count: int) -> Path:
    """Returns where process `index` of `count` writes its trace."""
    return run / "profile" if count == 1 else run / "profile" / f"process-{index}"
