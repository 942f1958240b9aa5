"""Where the time of a run goes: the loop's thread by part, and the device by piece of work.

The loop's thread is always in one part ("sample", "score", ...), so that the parts add up to the wall time. Programs
are dispatched and computed later; the loop meets the device where it needs a result. Such a wait belongs to what the
device was computing meanwhile. When a piece of work was done is noted by threads that wait for one small result of it:
neither the loop nor the device does anything for it.
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

MOST_WORK = 256  # pieces of work that are remembered: a few a step, for as many steps as a draw may wait


@dataclasses.dataclass(frozen=True)
class Work:
    """Programs that were dispatched together."""

    part: str
    result: weakref.ref[Array]  # one that is there when all is; its memory is given back where nobody else needs it
    devices: frozenset[jax.Device]
    dispatched: float  # monotonic seconds
    done: Future  # of the same; of None where the result was given away before


class StepWork(NamedTuple):
    """What belongs to one step."""

    seconds: dict[str, float]  # of the loop's thread by part, since the step before
    work: list[Work]  # sampling whose completions this step has learned from, and what learned from them
    drawn: list[dict[str, np.ndarray]]  # of each sampling call, the rollout's fields on the host
    packed: tuple[int, int, int] | None  # tokens an epoch, keys that they see, and those that are learned from


class RunClock:
    """Parts and work of a run since it was opened. Used by one thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.seconds: dict[str, float] = {}  # by part
        self._part, self._since = "start", now()
        # One thread for each set of devices, whose work ends in its order: it waits for results.
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
        """Ends the present part, and begins another."""
        now = self._now()
        self._add(self._part, now - self._since)
        self._part, self._since = part, now

    @contextlib.contextmanager
    def on(self, part: str) -> Iterator[None]:
        """Inside, the time is that of a part; what is nested inside is not."""
        outer = self._part
        self.switch(part)
        try:
            yield
        finally:
            self.switch(outer)

    def dispatched(self, part: str, result: Array) -> None:
        """Notes work that was dispatched since the present part began, where this process has a device of it."""
        if not result.sharding.addressable_devices:
            return

        def wait() -> float | None:
            try:
                jax.block_until_ready(result)
            except Exception:  # donated, or its program has failed, which the loop meets itself
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
        """Waits for a result that the loop needs now. The time is that of the work that was done meanwhile. Returns
        the seconds."""
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
        """Returns how long the device was at pieces of work: each from its dispatch, or the end of what was dispatched
        to the same devices before, to its own end. None where that is not known."""
        total, previous, wanted = 0.0, {}, {id(w) for w in work}
        for each in self._work:
            end = done_at(each)
            if id(each) in wanted:
                if end is None:
                    return None
                wanted.discard(id(each))
                total += max(end - max(each.dispatched, previous.get(each.devices, each.dispatched)), 0.0)
            if end is not None:
                previous[each.devices] = end
        return None if wanted or not work else total

    def close(self) -> None:
        """Waits for nothing."""
        for watcher in self._watchers.values():
            watcher.shutdown(wait=False, cancel_futures=True)


def done_at(work: Work) -> float | None:
    """Returns when work was done; None where it is not, or nobody knows."""
    result = work.result()
    try:
        if not work.done.done() and (result is None or not result.is_ready()):
            return None
    except RuntimeError:  # donated
        return None
    return work.done.result()


def split_wait(start: float, end: float, ended: Sequence[tuple[str, float]], part: str) -> dict[str, float]:
    """Returns the seconds of a wait by part: up to the end of each piece of work those of its part, the rest of `part`.

    Args:
      ended: (part, when it ended) of what the wait was for, and of what was dispatched before.
    """
    out: dict[str, float] = {}
    for of, at in sorted(ended, key=lambda pair: pair[1]):
        if start < at <= end:
            out[of] = out.get(of, 0.0) + at - start
            start = at
    out[part] = out.get(part, 0.0) + end - start
    return out
