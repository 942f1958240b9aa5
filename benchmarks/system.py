"""A system under measurement, seen from the command: a process in its own environment that is asked by JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class System(NamedTuple):
    name: str
    process: subprocess.Popen


def open_system(name: str, python: str, module: str, environment: dict[str, str] | None = None) -> System:
    """Starts `module` under the interpreter `python`. What it prints to standard error is shown when it fails."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false", **(environment or {})}
    process = subprocess.Popen(
        [python, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=variables
    )
    return System(name, process)


def open_jrl() -> System:
    return open_system("jrl", sys.executable, "benchmarks.jrl_side")


def ask(system: System, do: str, **arguments: Any) -> Any:
    """Returns the answer. Raises RuntimeError with the system's own traceback where it failed."""
    try:
        print(json.dumps({"do": do, **arguments}), file=system.process.stdin, flush=True)
        line = system.process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        raise RuntimeError(f"{system.name} ended while it did {do!r}, with {system.process.wait()}")
    answer = json.loads(line)
    if "failed" in answer:
        raise RuntimeError(f"{system.name} failed at {do!r}:\n{answer['failed']}")
    return answer["done"]


def close(system: System) -> None:
    system.process.stdin.close()
    system.process.wait()
