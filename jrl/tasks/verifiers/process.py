"""The trainer's side of the template: starts it, requests forks and reaps, closes it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from jrl.tasks.verifiers import VerifierSpec, frames
from jrl.tasks.verifiers.contract import Limits
from jrl.tasks.verifiers.source import PartSource

START_SECONDS = 120.0  # the slowest preload takes about 3 s on an idle machine
STARTS = 3  # attempts to start a template that dies during startup
ANSWER_SECONDS = 30.0


class TemplateRefused(ValueError):
    """The template runs but cannot serve the request: a user's verifier raised, or a row is unknown."""


class TemplateLost(RuntimeError):
    """The template died, or does not respond."""


class TemplateProcess:
    """The template process and the socket to it. Must be closed. Used only from the thread that created it.

    Fields:
        limits: of each row's verdicts, in the order of the rows. They can be trusted: the template sees no completion.
    """

    def __init__(
        self,
        parts: Sequence[PartSource],
        rows: Sequence[VerifierSpec],
        *,
        memory_mb: int,
        cpu_seconds: float,
        private: Sequence[str] = (),
    ):
        # In a notebook, sys.path contains "" for the working directory: only the user's parts may import from there.
        folders = [os.path.abspath(entry) if parts else entry for entry in sys.path]
        start = {
            "path": [folder for folder in folders if os.path.isabs(folder)],
            "parts": [part.to_json() for part in parts],
            "rows": [{"name": row.name, "fields": row.fields} for row in rows],
            "memory_mb": memory_mb,
            "cpu_seconds": cpu_seconds,
            "private": list(private),
        }
        for left in reversed(range(STARTS)):
            try:
                self._start(start)
                return
            except TemplateLost:  # killed by the system; a verifier that raises gives TemplateRefused
                if not left:
                    raise

    def _start(self, start: dict) -> None:
        """Starts the process and loads the verifiers in it. Raises TemplateLost or TemplateRefused."""
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jrl.tasks.verifiers.fork_server", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=environment(),
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # only the trainer handles Ctrl-C at the terminal
        )
        theirs.close()
        try:
            self.limits = [Limits(*limits) for limits in self._ask(start, START_SECONDS)["limits"]]
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self) -> tuple[socket.socket, int]:
        """Returns the socket to a new worker, and its pid. The worker sends `layers` once it is ready for items."""
        ours, theirs = socket.socketpair()
        try:
            pid = self._ask({"do": "fork"}, ANSWER_SECONDS, [theirs.fileno()])["pid"]
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return ours, pid

    def kill(self, pid: int) -> int:
        """Kills a worker that `fork` returned, with its process group, and returns its exit status (waitpid's)."""
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        return self._ask({"do": "reap", "pid": pid}, ANSWER_SECONDS)["status"]

    def load(self, rows: Sequence[VerifierSpec]) -> None:
        """Adds rows for workers forked from now on."""
        request = {"do": "load", "rows": [{"name": r.name, "fields": r.fields} for r in rows]}
        self.limits += [Limits(*limits) for limits in self._ask(request, START_SECONDS)["limits"]]

    def close(self, *, at_once: bool = False) -> None:
        """Ends the template, which first kills and reaps its workers. With `at_once`, kills the template; Linux then
        kills the workers."""
        self._socket.close()
        if at_once:
            self._process.kill()
        try:
            self._process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if not self._errors.closed:
            self._errors.close()

    def _ask(self, request: dict, seconds: float, fds: Sequence[int] = ()) -> dict:
        deadline = time.monotonic() + seconds
        frame = frames.pack(request, frames.REQUEST_LIMIT)
        try:
            self._socket.settimeout(seconds)
            if fds:
                sent = socket.send_fds(self._socket, [frame], fds)
                frame = frame[sent:]
            self._socket.sendall(frame)
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            answer = frames.read(self._socket, frames.REPLY_LIMIT)
        except (OSError, ValueError) as error:
            raise TemplateLost(f"the verifier template does not answer: {error!r}{self._last_words()}") from error
        if answer is None:
            raise TemplateLost(f"the verifier template died{self._last_words()}")
        if "failed" in answer:
            raise TemplateRefused(answer["failed"])
        return answer

    def _last_words(self) -> str:
        self._errors.seek(max(os.fstat(self._errors.fileno()).st_size - 2000, 0))
        words = self._errors.read().decode(errors="replace").strip()
        return f"; it wrote: {words}" if words else ""


def environment() -> dict[str, str]:
    """Returns the template's environment: of the trainer's only the locale and the paths of programs and libraries.

    Numeric libraries get one thread, since a process that forks must not have others.
    """
    inherited = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH") if name in os.environ}
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    fixed = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}
    root = str(pathlib.Path(__file__).resolve().parents[3])
    installed = root in site.getsitepackages()
    return {**inherited, **threads, **fixed, **({} if installed else {"PYTHONPATH": root})}
