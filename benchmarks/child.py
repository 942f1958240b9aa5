"""A system under measurement, as a process that answers questions: one JSON object a line, in and out.

Runs in every system's own environment, so it imports the standard library only.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def serve(*functions: Callable[..., Any]) -> None:
    """Answers requests from standard input until it ends: {"do": name of a function, ...} with {"done": result} or
    {"failed": text}. What libraries print goes to standard error.
    """
    named = {function.__name__: function for function in functions}
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"done": named[request.pop("do")](**request)}
        except Exception:
            answer = {"failed": traceback.format_exc()}
        print(json.dumps(answer), file=out)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Returns (seconds, what `call` returned). `call` must wait for its device."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def peak_bytes() -> int:
    """Returns the most memory that this process has held at once."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
