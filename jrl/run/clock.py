"""How a run spends its time: the loop's thread by part, and the device by piece of work.

The loop's thread is always in one part ("sample", "score", ...), so the parts add up to the wall time. Programs are
dispatched and computed later; the loop waits for the device when it needs a result. Such a wait counts as time of what
the device was computing meanwhile. Watcher threads, each waiting for one small result, record when a piece of work was
done, at no cost to the loop or the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from jrl.types import Array

MOST_WORK = 256  # pieces of work to remember: a few per step, for as many steps as a draw may wait


@dataclasses.dataclass(frozen=True)
class Work:
    """Programs that were dispatched together."""

    part: str
    result: weakref.ref[Array]  # ready when all the work is; weak, so that its memory can be freed
    devices: frozenset[jax.Device]
    dispatched: float  # monotonic seconds
    done: Future  # when the work was done, likewise; None if the result was donated


class StepWork(NamedTuple):
    """What belongs to one step."""

    seconds: dict[str, float]  # of the loop's thread by part, since the step before
    work: list[Work]  # the sampling of the completions that this step learned from, and the learning
    drawn: list[dict[str, np.ndarray]]  # of each sampling call, the rollout's fields on the host
    packed: tuple[int, int, int] | None  # tokens per epoch, keys that they attend to, tokens learned from


class RunClock:
    """Parts and work of a run since it was opened. Used by one thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.seconds: dict[str, float] = {}  # by part
        self._part, self._since = "start", now()
        # A thread per set of devices waits for results: work on the same devices ends in order.
        self._watchers: dict[frozenset, ThreadPoolExecutor] = {}
        self._work: deque[Work] = deque(maxlen=MOST_WORK)
        self._begin_step()

    def _begin_step(self) -> None:
        self._before = dict(self.seconds)
        self._of_step: list[Work] = []
        self.drawn: list[dict[str, np.ndarray]] = []
        self.packed: tuple[int, int, int] | None = None

    def _add(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """Returns the seconds by part up to now."""
        self.switch(self._part)
        return dict(self.seconds)

    def switch(self, part: str) -> None:
        """Ends the current part, and begins another."""
        now = self._now()
        self._add(self._part, now - self._since)
        self._part, self._since = part, now

    @contextlib.contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Counts the time inside as that of `part`, except nested blocks."""
        outer = self._part
        self.switch(part)
        try:
            yield
        finally:
            self.switch(outer)

    def dispatched(self, part: str, result: Array) -> None:
        """Records work that was dispatched since the current part began, if this process has one of its devices."""
        if not result.sharding.addressable_devices:
            return

        def wait() -> float | None:
            try:
                jax.block_until_ready(result)
            except Exception:  # donated, or its program has failed, which the loop will see
                return None
            return self._now()

        devices = frozenset(result.sharding.device_set)
        if devices not in self._watchers:
            self._watchers[devices] = ThreadPoolExecutor(1, thread_name_prefix="clock")
        work = Work(part, weakref.ref(result), devices, self._since, self._watchers[devices].submit(wait))
        self._work.append(work)
        if part != "sample":
            self._of_step.append(work)

    def wait_for(self, result: Array) -> float:
        """Waits for a result that the loop needs now, and returns the seconds. They count as time of the work that was
        done meanwhile."""
        start = self._now()
        self._add(self._part, start - self._since)
        jax.block_until_ready(result)
        self._since = self._now()
        before: list[Work] = []
        for work in self._work:
            before.append(work)
            if work.result() is result:
                break
        else:  # of an earlier process: a checkpoint had it
            self._add("sample", self._since - start)
            return self._since - start
        if work.part == "sample":  # drawn perhaps steps ago, and learned from now
            self._of_step.append(work)
        ended = [(w.part, at) for w in before if (at := done_at(w)) is not None]
        for part, seconds in split_wait(start, self._since, ended, work.part).items():
            self._add(part, seconds)
        return self._since - start

    def take_step(self) -> StepWork:
        """Returns what belongs to the step that ends now."""
        seconds = self.read()
        spent = {part: seconds[part] - self._before.get(part, 0.0) for part in seconds}
        step = StepWork({part: s for part, s in spent.items() if s > 0}, self._of_step, self.drawn, self.packed)
        self._begin_step()
        return step

    def device_seconds(self, work: Sequence[Work]) -> float | None:
        """Returns how long the device computed the work: each piece from its dispatch, or the end of what
        was dispatched to the same devices before, to its end. None if unknown."""
        total, previous_end, remaining = 0.0, {}, {id(w) for w in work}
        for piece in self._work:
            end = done_at(piece)
            if id(piece) in remaining:
                if end is None:
                    return None
                remaining.discard(id(piece))
                total += max(end - max(piece.dispatched, previous_end.get(piece.devices, piece.dispatched)), 0.0)
            if end is not None:
                previous_end[piece.devices] = end
        return None if remaining or not work else total

    def close(self) -> None:
        """Stops the watcher threads, without waiting for them."""
        for watcher in self._watchers.values():
            watcher.shutdown(wait=False, cancel_futures=True)


def done_at(work: Work) -> float | None:
    """Returns when work was done; None if it is not done, or unknown."""
    result = work.result()
    try:
        if not work.done.done() and (result is None or not result.is_ready()):
            return None
    except RuntimeError:  # donated
        return None
    return work.done.result()


def split_wait(start: float, end: float, ended: Sequence[tuple[str, float]], part: str) -> dict[str, float]:
    """Returns the seconds of a wait by part: up to the end of each piece of work for its part, the rest for `part`.

    Args:
      ended: (part, end) of the work that the wait was for, and of the work dispatched before it.
    """
    seconds: dict[str, float] = {}
    for work_part, work_end in sorted(ended, key=lambda pair: pair[1]):
        if start < work_end <= end:
            seconds[work_part] = seconds.get(work_part, 0.0) + work_end - start
            start = work_end
    seconds[part] = seconds.get(part, 0.0) + end - start
    return seconds
