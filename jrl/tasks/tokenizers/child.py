"""A child process for work that may not terminate. It receives requests as lines of JSON and can be killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ChildStuck(RuntimeError):
    """The child did not reply in time, and was killed."""


class ChildDied(RuntimeError):
    """The child ended before it replied."""


class Child:
    """A process that runs a script of this folder. Started at the first request and restarted after it ended. Any
    thread may call `ask`."""

    def __init__(self, script: str, *arguments: Any) -> None:
        self._command = [sys.executable, "-P", str(Path(__file__).with_name(script)), *map(str, arguments)]
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, Any], seconds: float, data: bytes = b"") -> dict[str, Any]:
        """Sends a request, followed by `data`, and returns the reply. Raises ChildStuck or ChildDied."""
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                return json.loads(self._exchange(line + data, seconds))
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _start(self) -> None:
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
        entries = os.pathsep.join(entry for entry in sys.path if os.path.isabs(entry))
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            env={**inherited, "PYTHONPATH": entries, "PYTHONUTF8": "1"}, start_new_session=True,
        )  # fmt: skip
        weakref.finalize(self, _end, self._process)

    def _exchange(self, request: bytes, seconds: float) -> bytes:
        """Sends a request and returns the line of the reply."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(BrokenPipeError):  # it died, which reading reports
            rest = memoryview(request)
            while rest:
                rest = rest[os.write(self._process.stdin.fileno(), rest) :]
        out, answer = self._process.stdout.fileno(), bytearray()
        poll = select.poll()  # `select.select` takes no descriptor above 1023
        poll.register(out, select.POLLIN)
        while not answer.endswith(b"\n"):
            if not poll.poll(1000 * max(deadline - time.monotonic(), 0)):
                raise ChildStuck(f"no answer in {seconds:.0f} seconds")
            part = os.read(out, 1 << 16)
            if not part:
                raise ChildDied("it ended without an answer")
            answer += part
        return bytes(answer)


def _end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with the processes it forked
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()
