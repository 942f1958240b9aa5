"""The template: a small process, started by exec, that loads the verifiers once and forks the workers.

    python -m jrl.tasks.verifiers.fork_server FD

FD is its end of a socket pair. It imports no JAX, starts no threads and has no secrets (`process.py` builds its
environment), so forking it is cheap and safe. A worker judges one item after another until its socket closes or it is
killed. The template reaps a worker only on request: until then the pid stays valid for the trainer to kill.
"""

from __future__ import annotations

import gc
import math
import os
import random
import resource
import signal
import socket
import sys
from typing import Any, NamedTuple

from jrl.tasks.example import Example
from jrl.tasks.verifiers import VERIFIERS, Verifier, VerifierSpec, config_of, frames, look_up, merge
from jrl.tasks.verifiers.changes import changed, snapshot
from jrl.tasks.verifiers.confine import ReadAccess, confine, detach, die_with_parent, read_access
from jrl.tasks.verifiers.contract import Limits
from jrl.tasks.verifiers.judge import describe, judge
from jrl.tasks.verifiers.source import PartSource, load_part

ERROR_BYTES = 1 << 20  # limit for standard error, which is a file: a part that writes too much cannot fill the disk
FORBIDDEN_MODULES = ("jax", "jaxlib")


class Bounds(NamedTuple):
    """The limits of a worker."""

    memory_mb: int
    cpu_seconds: float
    private: list[str]  # folders that it must not read


class ImportsJax(ValueError):
    """A part imports JAX, so it cannot be loaded here."""


def main(arguments: list[str]) -> int:
    die_with_parent()
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    most = ERROR_BYTES if allowed == resource.RLIM_INFINITY else min(ERROR_BYTES, allowed)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    control = socket.socket(fileno=int(arguments[0]))
    start = frames.read(control, frames.REQUEST_LIMIT)
    if start is None:
        return 0
    sys.path += [entry for entry in start["path"] if entry not in sys.path]
    try:
        table = load_table([PartSource.from_json(part) for part in start["parts"]])
        rows = load_rows(start["rows"], table)
        limits = limits_of(rows)
    except BaseException as error:  # a part may exit or raise anything; the trainer must get its message
        reply(control, {"failed": str(error) if isinstance(error, ImportsJax) else describe(error)})
        return 1
    reply(control, {"limits": limits})
    serve(control, table, rows, Bounds(start["memory_mb"], start["cpu_seconds"], start["private"]))
    return 0


def load_table(parts: list[PartSource]) -> dict[str, Verifier]:
    """Returns the verifier table extended by the user's parts. Raises ImportsJax if a part imports JAX."""
    user: list[Any] = []
    for index, part in enumerate(parts):
        user.append(load_part(part, index))
        for name in FORBIDDEN_MODULES:
            if name in sys.modules:
                raise ImportsJax(
                    f"{part.filename} imports {name}, so it cannot be loaded with the verifiers: they run in "
                    "processes without JAX. Put the verifiers into a file of their own"
                )
    return merge(VERIFIERS, *user)


def load_rows(rows: list[dict[str, Any]], table: dict[str, Verifier]) -> list[tuple[Verifier, Any]]:
    """Returns (verifier, config) for each row, after calling the verifier's preload."""
    loaded = []
    for fields in rows:
        spec = VerifierSpec(**fields)
        verifier = look_up(table, spec.name, "the run")
        if verifier.preload is not None:
            verifier.preload()
        loaded.append((verifier, config_of(spec, verifier)))
    return loaded


def limits_of(rows: list[tuple[Verifier, Any]]) -> list[Limits]:
    return [verifier.limits(config) for verifier, config in rows]


def serve(
    control: socket.socket,
    table: dict[str, Verifier],
    rows: list[tuple[Verifier, Any]],
    bounds: Bounds,
) -> None:
    """Serves fork, reap and load requests until the trainer's end closes; then kills all children."""
    children: set[int] = set()
    reads = read_access(bounds.private)
    try:
        while True:
            request, fds = frames.read_with_fds(control, frames.REQUEST_LIMIT, 1)
            if request is None:
                return
            match request["do"]:
                case "fork":
                    gc.freeze()  # a collection in a worker then does not copy the template's pages
                    template = os.getpid()
                    try:
                        pid = os.fork()
                    except OSError as error:
                        reply(control, {"failed": describe(error)})
                        os.close(fds[0])
                        continue
                    if pid == 0:
                        become_worker(fds[0], template, control, rows, bounds, reads)
                    os.close(fds[0])
                    children.add(pid)
                    reply(control, {"pid": pid})
                case "reap":
                    _, status = os.waitpid(request["pid"], 0)
                    children.discard(request["pid"])
                    reply(control, {"status": status})
                case "load":
                    try:
                        loaded = load_rows(request["rows"], table)
                        rows += loaded
                        reads = read_access(bounds.private)  # imports may have changed sys.path
                        reply(control, {"limits": limits_of(loaded)})
                    except BaseException as error:  # an import may raise anything; the trainer must get its message
                        reply(control, {"failed": describe(error)})
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def become_worker(
    fd: int,
    template: int,
    control: socket.socket,
    rows: list[tuple[Verifier, Any]],
    bounds: Bounds,
    reads: ReadAccess,
) -> None:
    """Runs a worker on descriptor `fd` and ends the process. Never returns into the template's loop.

    `template` is the pid of the process that forked it.
    """
    try:
        os.setsid()
        control.close()
        detach(fd)
        layers = confine(bounds.memory_mb, reads)
        if os.getppid() != template:
            return  # the template died before `die_with_parent` took effect
        work(socket.socket(fileno=fd), rows, layers, bounds.cpu_seconds)
    finally:
        os._exit(0)


def work(connection: socket.socket, rows: list[tuple[Verifier, Any]], layers: list[str], cpu_seconds: float) -> None:
    """Judges items until the socket closes. For each it sends a `start` frame, then one verdict with the item's token,
    and whether the item `changed` the code that the worker runs."""
    from_parts = [verifier not in VERIFIERS.values() for verifier, _ in rows]  # jrl's verifiers evaluate no text
    before = snapshot(rows) if any(from_parts) else None
    reply(connection, {"layers": layers})
    while True:
        item = frames.read(connection, frames.REQUEST_LIMIT)
        if item is None:
            return
        reply(connection, {"start": item["token"]})
        example = Example.from_json(item["example"])
        allow_cpu(cpu_seconds)
        seed_everything()
        verifier, config = rows[item["row"]]
        verdict = judge(verifier, config, item["completion"], example)
        fields = {"token": item["token"], "status": int(verdict.status), "reward": verdict.reward}
        fields |= {"detail": verdict.detail, "spans": verdict.spans}
        reply(connection, {**fields, "changed": from_parts[item["row"]] and changed(before, rows)})


def allow_cpu(cpu_seconds: float) -> None:
    """Limits the CPU time of the next item from inside the worker too. The trainer's clock is exact; this limit works
    even if the trainer stalls."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime + cpu_seconds) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))


def seed_everything() -> None:
    """Seeds the global generators: a verifier that draws from them gives an item the same verdict in every worker and
    order."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def reply(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(frames.pack(message, frames.REPLY_LIMIT))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
