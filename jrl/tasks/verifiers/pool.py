"""Killable workers that score completions while the device computes. Every item gets exactly one verdict.

One thread of the trainer owns everything here: it gives each idle worker one item, watches the worker's CPU clock, and
kills workers that overrun. The verdicts do not depend on which worker judges an item, or when.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import json
import logging
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jrl.tasks.example import Example
from jrl.tasks.stopping import Stop, StopRequested, never
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers import VerifierSpec, frames
from jrl.tasks.verifiers.confine import missing_layers
from jrl.tasks.verifiers.contract import Limits
from jrl.tasks.verifiers.judge import ALLOWED_STATUSES, DETAIL_LIMIT, to_verdict
from jrl.tasks.verifiers.process import TemplateLost, TemplateProcess, TemplateRefused
from jrl.tasks.verifiers.source import PartSource

_log = logging.getLogger(__name__)
HELLO_SECONDS = 30.0
TRIES = 2  # of an item if its worker died before it started the item, or with the template
ASK_SECONDS = 0.1  # between two checks of whether to stop, and of the progress
RESTARTS_IN_A_ROW = 3  # of workers or a template that die before they score anything


class ScoringAbandoned(StopRequested):
    """The run was stopped while workers scored. They were killed, and no verdict of the batch is known."""


@dataclasses.dataclass(frozen=True)
class Item:
    """One completion and the rows that score it, as indices into the pool's rows."""

    completion: str
    example: Example
    rows: tuple[int, ...]


class Ticket:
    """The handle that `submit` returns for the verdicts of one batch. Pass it to `collect`."""

    def __init__(self, shape: Sequence[int]):
        self.verdicts: list[list[Verdict | None]] = [[None] * n for n in shape]
        self.missing = sum(shape)
        self.items_done = sum(not n for n in shape)
        self.done = threading.Event()
        if not self.missing:
            self.done.set()


@dataclasses.dataclass
class _Task:
    """One row and one item: the unit of work of a worker."""

    ticket: Ticket
    item: int
    slot: int  # index of the row among the item's rows
    row: int
    text: str  # the request as JSON, without its token
    characters: int  # of the completion
    tries: int = 0


@dataclasses.dataclass
class _Addition:
    """A request to load a row, and its result."""

    row: VerifierSpec
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    error: Exception | None = None


@dataclasses.dataclass
class _Child:
    """A worker as the trainer sees it."""

    connection: socket.socket
    pid: int
    rows: int  # number of rows that it can score
    deadline: float  # monotonic seconds, for its first frame, then for its task
    ready: bool = False
    task: _Task | None = None
    token: int = 0
    started: bool = False
    cpu_before: float = 0.0
    incoming: bytearray = dataclasses.field(default_factory=bytearray)
    outgoing: bytearray = dataclasses.field(default_factory=bytearray)


class Pool:
    """Worker processes for a set of verifiers. Must be closed; a `with` block or the interpreter's end does it.

    Args:
        rows: the run's verifiers; `add_row` adds others later.
        parts: the user's parts files that define verifiers, as source.
        workers: number of processes that score at the same time.
        cpu_seconds: CPU time that one verifier may spend on one completion.
        wall_seconds: the same in wall time, for verifiers that sleep or block.
        memory_mb: MiB of address space that a worker may use beyond its size after loading.
        private: folders that a worker of root must not read even below module folders, such as the run's.

    Raises:
        ValueError: a part does not load, or a row is not in the table; the message is the template's.
        RuntimeError: no template could be started.
    """

    def __init__(
        self,
        rows: Sequence[VerifierSpec],
        parts: Sequence[PartSource] = (),
        *,
        workers: int,
        cpu_seconds: float,
        wall_seconds: float,
        memory_mb: int,
        private: Sequence[str | os.PathLike[str]] = (),
    ):
        for name, value in (
            ("workers", workers),
            ("cpu_seconds", cpu_seconds),
            ("wall_seconds", wall_seconds),
            ("memory_mb", memory_mb),
        ):
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        self.counts: collections.Counter[str] = collections.Counter()  # workers_started, _killed, _changed...
        self.layers: tuple[str, ...] = ()  # the layers that confine the workers, as they report them
        self._rows = list(rows)
        self._parts = tuple(parts)
        self._workers = workers
        self._cpu_seconds = cpu_seconds
        self._wall_seconds = wall_seconds
        self._memory_mb = memory_mb
        self._private = [os.path.abspath(folder) for folder in private]
        self._lock = threading.Lock()
        self._inbox: collections.deque[_Task] = collections.deque()
        self._additions: list[_Addition] = []
        self._abandoned: list[Ticket] = []
        self._closing = False  # no further items are accepted
        self._closed = False
        self._failure: BaseException | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._started = threading.Event()
        self._loaded = 0  # rows that the template has loaded
        self._template: TemplateProcess | None = None
        self._children: list[_Child] = []
        self._tasks: collections.deque[_Task] = collections.deque()
        self._false_starts = 0
        self._selector = selectors.DefaultSelector()
        # A daemon, because an open pool must not keep the interpreter alive; atexit closes it before shutdown.
        self._thread = threading.Thread(target=self._run, name="jrl-verifiers", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            self._close_sockets()
            raise self._failure
        atexit.register(self.close)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def template_pid(self) -> int | None:
        return self._template.pid if self._template else None

    def worker_pids(self) -> list[int]:
        return [child.pid for child in list(self._children)]

    def row(self, index: int) -> VerifierSpec:
        """Returns the row at an index, such as one that `add_row` returned."""
        return self._rows[index]

    def add_row(self, row: VerifierSpec) -> int:
        """Returns the index of `row`, after the template has loaded it.

        Raises:
            ValueError: it does not load; the message is the template's.
            RuntimeError: the template died, does not respond or cannot be started again; or the pool is closed.
        """
        if row in self._rows:
            return self._rows.index(row)
        addition = _Addition(row)
        with self._lock:
            self._refuse_if_closed()
            self._additions.append(addition)
        self._wake()
        addition.done.wait()
        if addition.error is not None:
            raise addition.error
        return self._rows.index(row)

    def submit(self, items: Sequence[Item]) -> Ticket:
        """Returns a ticket for the verdicts without waiting.

        Raises:
            ValueError: an example's info cannot be written as JSON.
            ValueError: a row index that does not exist.
        """
        ticket = Ticket([len(item.rows) for item in items])
        texts: dict[int, str] = {}  # samples of a prompt share their example: write it once
        tasks = []
        for index, item in enumerate(items):
            if id(item.example) not in texts:
                texts[id(item.example)] = _example_text(item.example)
            for slot, row in enumerate(item.rows):
                if not 0 <= row < len(self._rows):
                    raise ValueError(f"item {index} names row {row}; the pool has {len(self._rows)}")
                text = (
                    f'"row": {row}, "completion": {json.dumps(item.completion)}, "example": {texts[id(item.example)]}'
                )
                if len(text) > frames.REQUEST_LIMIT - 100:
                    detail = f"completion and example take {len(text)} bytes; at most {frames.REQUEST_LIMIT} are sent"
                    _settle(_Task(ticket, index, slot, row, "", 0), Verdict(Status.FORBIDDEN, None, detail))
                else:
                    tasks.append(_Task(ticket, index, slot, row, text, len(item.completion)))
        with self._lock:
            self._refuse_if_closed()
            self._inbox.extend(tasks)
        self._wake()
        return ticket

    def collect(
        self, ticket: Ticket, stop: Stop = never, progress: Callable[[int, int], None] | None = None
    ) -> list[tuple[Verdict, ...]]:
        """Waits for the ticket's verdicts and returns them: one tuple per item, in the order of the items and rows.

        Args:
            stop: polled every ASK_SECONDS.
            progress: called with (items scored, items) when that changes, at most every ASK_SECONDS, by this thread.

        Raises:
            ScoringAbandoned: `stop` returned True. The workers on this batch are being killed; the pool stays usable.
            RuntimeError: the pool has failed.
        """
        last, total = -1, len(ticket.verdicts)
        while True:
            finished = ticket.done.wait(ASK_SECONDS)
            if progress is not None and ticket.items_done != last:
                last = ticket.items_done
                progress(last, total)
            if finished:
                break
            if stop():
                self._abandon(ticket)
                raise ScoringAbandoned(f"stopped with {ticket.items_done} of {total} completions scored")
        if self._failure is not None:
            raise RuntimeError("the verifier pool stopped") from self._failure
        return [tuple(v for v in row if v is not None) for row in ticket.verdicts]

    def _abandon(self, ticket: Ticket) -> None:
        with self._lock:
            self._abandoned.append(ticket)
        self._wake()

    def close(self) -> None:
        """Kills the workers, ends the template and returns once they are gone. Missing verdicts become INFRA_ERROR."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join()
        self._close_sockets()

    def _refuse_if_closed(self) -> None:
        if self._closing:
            raise RuntimeError("the pool is closed") from self._failure

    # The methods below run in the pool's thread.

    def _run(self) -> None:
        try:
            self._selector.register(self._wake_in, selectors.EVENT_READ, None)
            self._start_template()
            self._keep_workers()
            self._started.set()
            while not self._closing:
                self._step()
        except TemplateRefused as error:
            self._failure = ValueError(str(error))
        except BaseException as error:
            self._failure = error
        finally:
            self._started.set()
            self._shut_down()

    def _step(self) -> None:
        """Gives tasks to the workers, waits for the next event, and handles it."""
        with self._lock:
            self._tasks.extend(self._inbox)
            self._inbox.clear()
            additions, self._additions = self._additions, []
            abandoned, self._abandoned = self._abandoned, []
        for ticket in abandoned:
            self._drop(ticket)
        for addition in additions:
            self._add(addition)
        if self._template is None and self._tasks:
            self._start_again()
        if self._template is not None:
            try:
                self._keep_workers()
                self._feed()
            except TemplateLost:
                self._lose_template()
        for key, events in self._selector.select(self._patience()):
            child = key.data
            if child is None:
                self._wake_in.recv(4096)
            elif child in self._children:
                self._attend(child, events)
        now = time.monotonic()
        for child in list(self._children):
            self._watch(child, now)

    def _drop(self, ticket: Ticket) -> None:
        """Drops an abandoned batch, and kills the workers that are scoring it."""
        abandoned = Verdict(Status.INFRA_ERROR, None, "the run was asked to stop")
        for child in list(self._children):
            if child.task is not None and child.task.ticket is ticket:
                self._bury(child, abandoned)
        waiting = [task for task in self._tasks if task.ticket is ticket]
        self._tasks = collections.deque(task for task in self._tasks if task.ticket is not ticket)
        for task in waiting:
            _settle(task, abandoned)

    def _start_template(self) -> None:
        self.counts["templates_started"] += 1
        limits = {"memory_mb": self._memory_mb, "cpu_seconds": self._cpu_seconds}
        self._template = TemplateProcess(self._parts, self._rows, **limits, private=self._private)
        self._loaded = len(self._rows)

    def _lose_template(self) -> None:
        """Cleans up after a template died. Its workers died with it, and their items are retried once."""
        self._template.close(at_once=True)
        self._template = None
        self._false_starts += 1
        orphans, self._children = self._children, []
        for child in orphans:
            self._forget(child)
            self._retry(child, "the verifier template died")

    def _start_again(self) -> None:
        """Restarts the template for the waiting tasks; gives them up after more than RESTARTS_IN_A_ROW failures."""
        why = "it dies before it judges anything"
        if self._false_starts <= RESTARTS_IN_A_ROW:
            try:
                self._start_template()
                return
            except (TemplateLost, TemplateRefused, OSError) as error:
                self._false_starts += 1
                why = str(error)
        if self._false_starts > RESTARTS_IN_A_ROW:
            self._give_up(f"the verifier template cannot be restarted: {why}")

    def _give_up(self, why: str) -> None:
        """Settles all waiting tasks with INFRA_ERROR. The count of failures restarts at 0."""
        for task in self._tasks:
            _settle(task, Verdict(Status.INFRA_ERROR, None, why))
        self._tasks.clear()
        self._false_starts = 0

    def _keep_workers(self) -> None:
        while self._template is not None and len(self._children) < self._workers:
            try:
                connection, pid = self._template.fork()
            except TemplateRefused as error:  # the system cannot start another process
                self._false_starts += 1
                if self._false_starts > RESTARTS_IN_A_ROW and not self._children:
                    self._give_up(f"no worker could be forked: {error}")
                return
            child = _Child(connection, pid, self._loaded, time.monotonic() + HELLO_SECONDS)
            self._children.append(child)
            self._selector.register(connection, selectors.EVENT_READ, child)
            self.counts["workers_started"] += 1

    def _feed(self) -> None:
        """Gives every idle worker a task it can score."""
        for child in list(self._children):
            if not self._tasks:
                return
            if child not in self._children or not child.ready or child.task is not None:
                continue
            if self._tasks[0].row >= child.rows:
                self._bury(child)  # it was forked before the row was added
                self._keep_workers()
                continue
            self._hand(child, self._tasks.popleft())

    def _add(self, addition: _Addition) -> None:
        """Loads a row into the template. Workers forked before cannot score it, and are replaced in `_feed`."""
        try:
            if self._template is None:
                self._start_template()
            self._template.load([addition.row])
            self._rows.append(addition.row)
            self._loaded = len(self._rows)
        except (TemplateRefused, frames.Oversized) as error:
            addition.error = ValueError(str(error))
        except (TemplateLost, OSError) as error:
            if self._template is not None:
                self._lose_template()
            addition.error = RuntimeError(f"the verifier {addition.row.name} could not be loaded: {error}")
        addition.done.set()

    def _hand(self, child: _Child, task: _Task) -> None:
        child.task, child.started = task, False
        # Each item has a secret token: a frame that another item left in the pipe cannot answer for this one.
        child.token = secrets.randbits(62)
        child.cpu_before = _cpu_seconds_of(child.pid)
        child.deadline = time.monotonic() + self._wall_seconds
        child.outgoing += frames.pack_text(f'{{"token": {child.token}, {task.text}}}', frames.REQUEST_LIMIT)
        self._send(child)

    def _send(self, child: _Child) -> None:
        """Writes as much as the socket accepts. A dead worker is detected when its socket is read."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while child.outgoing:
                del child.outgoing[: child.connection.send(child.outgoing)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.outgoing else 0)
        self._selector.modify(child.connection, events, child)

    def _attend(self, child: _Child, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(child)
        if not events & selectors.EVENT_READ:
            return
        try:
            data = child.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._bury(child)
            return
        child.incoming += data
        try:
            while (frame := frames.pop(child.incoming, frames.REPLY_LIMIT)) is not None:
                self._hear(child, frame)
        except frames.Oversized as error:
            self._bury(child, Verdict(Status.OUTPUT_LIMIT, None, f"the worker wrote {error}"))
        except frames.Garbled as error:
            self._bury(child, Verdict(Status.CRASH, None, f"the worker wrote {error}"))

    def _hear(self, child: _Child, frame: dict[str, Any]) -> None:
        """Handles one frame of a worker. Raises Garbled for an unexpected one."""
        if not child.ready:
            if not isinstance(frame.get("layers"), list):
                raise frames.Garbled("a first frame without its layers")
            child.ready = True
            if not self.layers:
                _warn_of(missing_layers(frame["layers"], root=os.geteuid() == 0))
            self.layers = tuple(map(str, frame["layers"]))
        elif child.task is not None and not child.started and frame.get("start") == child.token:
            child.started = True
        elif child.task is not None and child.started and frame.get("token") == child.token:
            limits = self._template.limits[child.task.row]
            verdict = _verdict_of(frame, limits, child.task.characters)
            task, child.task = child.task, None
            self._false_starts = 0
            _settle(task, verdict)
            changed = frame.get("changed") is not False
            self.counts["workers_changed"] += changed
            if changed or limits.single_use or verdict.status is Status.MEMORY_LIMIT:
                self._bury(child)  # after running out of memory, it may not free what it has
        else:
            raise frames.Garbled("a frame that was not due")

    def _watch(self, child: _Child, now: float) -> None:
        """Kills a worker if its item exceeded its CPU or wall time."""
        if child not in self._children or (child.ready and child.task is None):
            return
        if child.task is not None and _cpu_seconds_of(child.pid) - child.cpu_before >= self._cpu_seconds:
            self._bury(child, Verdict(Status.CPU_LIMIT, None, f"took more CPU time than {self._cpu_seconds:g} s"))
        elif now >= child.deadline:
            detail = f"took longer than {self._wall_seconds:g} s of wall time"
            self._bury(child, Verdict(Status.CPU_LIMIT, None, detail))

    def _patience(self) -> float | None:
        """Returns the seconds until a worker can overrun: its CPU clock is no faster than wall time, as it has one
        thread. None: no limit."""
        if self._template is None:
            return 0.01 if self._tasks else None
        now, soonest = time.monotonic(), None
        for child in self._children:
            if child.ready and child.task is None:
                continue
            left = child.deadline - now
            if child.task is not None:
                cpu_left = self._cpu_seconds - (_cpu_seconds_of(child.pid) - child.cpu_before)
                left = min(left, max(cpu_left, 0.01))  # do not poll a worker that sleeps just below its limit
            soonest = left if soonest is None else min(soonest, left)
        if soonest is None and len(self._children) < self._workers and self._tasks:
            return 0.1  # the last fork failed
        return None if soonest is None else max(soonest, 0.001)

    def _bury(self, child: _Child, verdict: Verdict | None = None) -> None:
        """Kills a worker and settles its item with `verdict`, or with a verdict for its exit status."""
        if child not in self._children:
            return
        self._children.remove(child)
        self._forget(child)
        self.counts["workers_killed"] += 1
        try:
            status = self._template.kill(child.pid)
        except TemplateLost:
            if child.task is not None and verdict is not None:
                _settle(child.task, verdict)
            else:
                self._retry(child, "the verifier template died")
            self._lose_template()
            return
        if not child.ready:
            self._false_starts += 1
            if self._false_starts > RESTARTS_IN_A_ROW:
                self._give_up("workers die before they are ready")
        if child.task is None:
            return
        if verdict is None and not child.started:
            self._retry(child, f"the worker died before the item began ({_end(status)})")
            return
        if verdict is None:
            over = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
            verdict = Verdict(Status.CPU_LIMIT if over else Status.CRASH, None, f"the worker died: {_end(status)}")
        _settle(child.task, verdict)

    def _retry(self, child: _Child, why: str) -> None:
        task = child.task
        if task is None:
            return
        task.tries += 1
        if task.tries < TRIES:
            self.counts["items_retried"] += 1
            self._tasks.appendleft(task)
        else:
            _settle(task, Verdict(Status.INFRA_ERROR, None, why))

    def _forget(self, child: _Child) -> None:
        self._selector.unregister(child.connection)
        child.connection.close()

    def _shut_down(self) -> None:
        for child in self._children:
            self._forget(child)
            if child.task is not None:
                _settle(child.task, Verdict(Status.INFRA_ERROR, None, "the pool was closed"))
        self._children = []
        if self._template is not None:
            self._template.close()
        with self._lock:
            self._closing = True
            self._tasks.extend(self._inbox)
            self._inbox.clear()
        for addition in self._additions:
            addition.error = RuntimeError("the pool was closed")
            addition.done.set()
        self._give_up("the pool was closed")

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_out.send(b"\0")

    def _close_sockets(self) -> None:
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()


def _warn_of(missing: list[str]) -> None:
    if missing:
        _log.warning("verifier workers run without %s on this machine; SECURITY.md says why", " and ".join(missing))


def _settle(task: _Task, verdict: Verdict) -> None:
    """Records the verdict of a task, once."""
    row = task.ticket.verdicts[task.item]
    if row[task.slot] is not None:
        raise AssertionError(f"item {task.item} has a verdict already")
    row[task.slot] = verdict
    task.ticket.items_done += all(verdict is not None for verdict in row)
    task.ticket.missing -= 1
    if not task.ticket.missing:
        task.ticket.done.set()


def _verdict_of(frame: dict[str, Any], limits: Limits, characters: int) -> Verdict:
    """Returns the verdict in a worker's frame. Raises Garbled if it is not one that `judge` could return."""
    status, reward, detail = frame.get("status"), frame.get("reward"), frame.get("detail")
    known = type(status) is int and status in (*ALLOWED_STATUSES, Status.MEMORY_LIMIT)
    if not known or not isinstance(detail, str) or len(detail) > DETAIL_LIMIT:
        raise frames.Garbled("a verdict without its fields")
    if Status(status).scorable != isinstance(reward, float):
        raise frames.Garbled(f"a verdict {Status(status).name} with the reward {reward!r}")
    verdict = Verdict(Status(status), reward, detail, _spans_of(frame))
    if verdict.status.scorable and to_verdict(verdict, limits, characters) != verdict:
        raise frames.Garbled(f"a verdict that its verifier may not give: {verdict!r:.200}")
    return verdict


def _spans_of(frame: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    """Returns the rewards of spans in a worker's frame. Raises Garbled if they are invalid."""
    try:
        spans = tuple((end, reward) for end, reward in frame["spans"])
    except (KeyError, TypeError, ValueError) as error:
        raise frames.Garbled("a verdict without its spans") from error
    if not all(type(end) is int and type(reward) is float for end, reward in spans):
        raise frames.Garbled(f"a verdict with the spans {spans!r:.100}")
    return spans


def _example_text(example: Example) -> str:
    try:
        return json.dumps(example.to_json())
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the info of example {example.id!r} cannot be written as JSON for its verifiers: {error}"
        ) from error


def _cpu_seconds_of(pid: int) -> float:
    """Returns the CPU time that a worker has used in all its threads, in seconds; 0 outside Linux or after it ended.

    Linux has a CPU clock for every process; elsewhere only the CPU limit that the worker sets for itself applies. The
    pid stays the worker's until the template reaps it, which it only does on request.
    """
    if sys.platform != "linux":
        return 0.0
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0  # it has ended; its socket is closed


def _end(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)} ({signal.strsignal(os.WTERMSIG(status))})"
    return f"exit code {os.waitstatus_to_exitcode(status)}"
