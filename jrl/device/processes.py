"""The processes of a run: how they agree, and exchange what only one of them knows.

Every process runs the same program in the same order. What only one process can know (a signal, a score, an error) goes
through `exchange`, which returns the values of all processes, so that all take the same branch. It uses JAX's
coordination service, a key-value table in process 0: no device program, no order of collectives to keep. A single
process exchanges with itself, without any call.

No JAX here, because the code that scores completions uses this module and does not import JAX. `joining` joins the
processes, `placement` moves their arrays.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

START_SECONDS = 30  # how long a process waits for the others when it starts
LOOK_SECONDS = 0.5  # how often a process that waits for another checks whether that one has failed
FAILURE = "failure"  # the key for the error with which a process ends
ENDING = "ending"  # the key with which a process acknowledges that error
RECENT_STEPS, LATE_STEPS, LATE_SECONDS = 20, 3, 30  # a step is late after 3 times the median of 20, and 30 s
RESTART = "Start all processes again with the same command: the run continues from its last checkpoint."


class HostLost(RuntimeError):
    """Another process is gone or does not answer. Start all of them again: the run resumes from its last save."""


class StoreLost(HostLost):
    """The store, which process 0 holds, does not answer."""


class ProcessesDisagree(ValueError):
    """The processes of a run were not started with the same configuration, code, libraries or data."""


class OtherProcessFailed(RuntimeError):
    """Another process has ended with an error. It has that process's message and exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Store(Protocol):
    """A table of bytes by key, shared by all processes."""

    def put(self, key: str, value: bytes) -> None:
        """Sets a key, which may exist."""

    def wait(self, key: str, seconds: float) -> bytes | None:
        """Returns a key's value once it exists; None after `seconds`."""

    def list(self, folder: str) -> dict[str, bytes]:
        """Returns all values of keys that begin with FOLDER/."""

    def delete(self, key: str) -> None:
        """Removes a key."""


class Cluster(NamedTuple):
    """Where the processes of a run meet."""

    address: str | None  # HOST:PORT of process 0; None: found by JAX on a Cloud TPU slice
    count: int
    index: int  # of this process


class ProcessStatus:
    """What a process is doing, which the others show if it is lost. Set by the main thread, read by the heartbeat."""

    def __init__(self) -> None:
        self.step, self.doing, self.since = 0, "starting", time.monotonic()
        self.stepped = self.since  # when the last step ended
        self._seconds: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)

    def begin(self, doing: str) -> None:
        """Records what the process starts doing."""
        if doing != self.doing:
            self.doing, self.since = doing, time.monotonic()

    def ended(self, step: int) -> None:
        """Records that a step has ended."""
        now = time.monotonic()
        if self.step:  # the first step of a process compiles
            self._seconds.append(now - self.stepped)
        self.step, self.stepped = step, now

    def overdue(self) -> float | None:
        """Returns the seconds since the last step if they are many more than a step takes; None otherwise."""
        waited = time.monotonic() - self.stepped
        is_late = self._seconds and waited > LATE_STEPS * statistics.median(self._seconds) + LATE_SECONDS
        return waited if is_late else None

    def __str__(self) -> str:
        return f"after step {self.step}, {self.doing} for {time.monotonic() - self.since:.0f} s"


@dataclasses.dataclass(eq=False)
class Processes:
    """The processes of this run. All of them call `exchange`, and the methods that use it, in the same order and from
    one thread."""

    index: int = 0  # of this process
    count: int = 1
    store: Store | None = None  # None: a single process
    names: tuple[str, ...] = ()  # of every process: "process 1 (HOST, pid 123)"
    status: ProcessStatus = dataclasses.field(default_factory=ProcessStatus)
    ended_by: OtherProcessFailed | None = None  # why the run ends, once this process knows
    _serial: itertools.count = dataclasses.field(default_factory=itertools.count)

    @property
    def writer(self) -> bool:
        """Whether this process writes the outputs of the run: manifest, metrics, summary, display."""
        return self.index == 0

    def name(self, index: int) -> str:
        return self.names[index] if index < len(self.names) else f"process {index}"

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Returns the values of all processes, in their order.

        Args:
          what: the place in the program, the same in all processes.
          value: JSON values and numpy arrays; no pickled objects.

        Raises: OtherProcessFailed if another process has ended; RuntimeError if one is elsewhere in the program.
        """
        if self.store is None:
            return [value]
        serial = next(self._serial)
        self.store.put(f"exchange/{serial}/{self.index}", encode({"at": what, "value": value}))
        entries = [
            {"at": what, "value": value} if i == self.index else decode(self._wait(f"exchange/{serial}/{i}", what))
            for i in range(self.count)
        ]
        if serial:  # a process that has come here has read all entries of the exchange before
            self.store.delete(f"exchange/{serial - 1}/{self.index}")
        for i, entry in enumerate(entries):
            if entry["at"] != what:
                raise RuntimeError(
                    f"{self.name(i)} is at {entry['at']!r} and {self.name(self.index)} at {what!r}: the processes have "
                    "taken different branches"
                )
        return [entry["value"] for entry in entries]

    def barrier(self, what: str) -> None:
        """Returns once all processes have called it."""
        self.exchange(what, None)

    def any(self, what: str, flag: bool) -> bool:
        """Whether the flag is set in any process, such as for a requested stop or a full disk."""
        return any(self.exchange(what, bool(flag)))

    def from_writer(self, what: str, value: Any) -> Any:
        """Returns process 0's value in all processes."""
        return self.exchange(what, value if self.writer else None)[0]

    def agree(self, what: str, facts: Mapping[str, Any]) -> None:
        """Raises ProcessesDisagree if a fact differs between processes, naming them and both values."""
        if self.store is None:
            return
        expected, *others = self.exchange(what, {name: str(fact) for name, fact in facts.items()})
        lines = []
        for i, actual in enumerate(others, start=1):
            for name in sorted({*expected, *actual}):
                first, second = expected.get(name, "not there"), actual.get(name, "not there")
                if first != second:
                    lines.append(f"{name}: {_short(first)} in {self.name(0)}, {_short(second)} in {self.name(i)}")
        if lines:
            more = f"\n  and {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else ""
            raise ProcessesDisagree(
                f"the processes of this run disagree ({what}); nothing was compiled or written:\n  "
                + "\n  ".join(lines[:MOST_LINES])
                + more
            )

    def share(self, rows: int) -> range:
        """Returns this process's share of `rows` rows, which it decodes, scores and stores."""
        return range(rows * self.index // self.count, rows * (self.index + 1) // self.count)

    def fail(self, message: str, code: int) -> None:
        """Announces that this process ends with an error; the others end too."""
        if self.store is not None:
            self.ended_by = OtherProcessFailed(message, code)
            self.store.put(f"{FAILURE}/{self.index}", encode({"message": message, "code": code}))

    def failure(self) -> OtherProcessFailed | None:
        """Returns the error of another process that has failed; None if none has."""
        if self.store is None:
            return None
        for key, value in sorted(self.store.list(FAILURE).items()):
            index, error = int(key.rsplit("/", 1)[-1]), decode(value)
            if index != self.index:
                failure = OtherProcessFailed(f"{self.name(index)} has ended: {error['message']}", error["code"])
                self.ended_by = self.ended_by or failure
                return failure
        return None

    def acknowledge(self) -> None:
        """Announces that this process has read why the run ends, and no longer needs the others."""
        if self.store is not None:
            self.store.put(f"{ENDING}/{self.index}", encode(None))

    def all_end(self) -> bool:
        """Whether every process has failed or acknowledged the failure of another."""
        keys = [*self.store.list(FAILURE), *self.store.list(ENDING)] if self.store is not None else []
        return len({key.rsplit("/", 1)[-1] for key in keys} | {str(self.index)}) == self.count

    def check(self) -> None:
        """Raises OtherProcessFailed if another process has failed, HostLost if process 0 does not answer."""
        with self._named():
            if (failure := self.failure()) is not None:
                raise failure

    def _wait(self, key: str, what: str) -> bytes:
        with self._named():
            while (value := self.store.wait(key, LOOK_SECONDS)) is None:
                self.check()
        return value

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Turns a StoreLost, which has no process's name, into a HostLost that names process 0."""
        try:
            yield
        except StoreLost as error:
            raise HostLost(f"{self.name(0)} is gone or does not answer. {RESTART}\n  {error}") from error


MOST_LINES = 12  # most differences that a message lists
ONE = Processes()


def encode(value: Any) -> bytes:
    """Returns JSON values and numpy arrays as bytes: a line of JSON, in which {"__array__": [dtype, shape, start]}
    replaces each array, followed by the arrays' bytes."""
    parts: list[bytes] = []

    def plain(x: Any) -> Any:
        if isinstance(x, np.ndarray | np.generic):
            x = np.asarray(x)
            if x.dtype.kind == "V":  # such as bfloat16, whose name `str` does not give
                raise TypeError(f"arrays of {x.dtype} cannot be sent to other processes")
            start = sum(map(len, parts))
            parts.append(x.tobytes())
            return {"__array__": [x.dtype.str, list(x.shape), start]}
        if isinstance(x, Mapping):
            return {str(name): plain(item) for name, item in x.items()}
        return [plain(item) for item in x] if isinstance(x, list | tuple) else x

    head = json.dumps(plain(value)).encode()
    return b"\n".join([head, b"".join(parts)])


def decode(data: bytes) -> Any:
    """Returns the value that was encoded; tuples become lists."""
    head, _, body = data.partition(b"\n")

    def full(x: Any) -> Any:
        if isinstance(x, dict) and x.keys() == {"__array__"}:
            dtype, shape, start = x["__array__"]
            count = int(np.prod(shape, dtype=np.int64))
            return np.frombuffer(body, np.dtype(dtype), count, start).reshape(shape).copy()
        if isinstance(x, dict):
            return {name: full(item) for name, item in x.items()}
        return [full(item) for item in x] if isinstance(x, list) else x

    return full(json.loads(head))


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:96]} ..."
