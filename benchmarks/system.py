"""A system under measurement, seen from the command: a process in its own environment that is asked by JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
BEFORE = "before"  # jrl of another checkout


class System(NamedTuple):
    name: str
    process: subprocess.Popen
    log: Path  # what it prints


def open_system(
    name: str, python: str, scratch: Path, environment: dict[str, str] | None = None, root: Path = ROOT
) -> System:
    """Starts a system under the interpreter `python` of its environment, with the sources of the checkout `root`."""
    variables = {**os.environ, "PYTHONPATH": str(root), "TOKENIZERS_PARALLELISM": "false", **(environment or {})}
    side = "jrl" if name == BEFORE else name
    log = Path(tempfile.mkdtemp(dir=scratch)) / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [python, "-m", f"benchmarks.{side}_side"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            cwd=root,
            env=variables,
        )
    return System(name, process, log)


def ask(system: System, do: str, **arguments: Any) -> Any:
    """Returns the answer. Raises RuntimeError with the system's own traceback where it failed."""
    try:
        print(json.dumps({"do": do, **arguments}), file=system.process.stdin, flush=True)
        line = system.process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        log_tail = system.log.read_text()[-3000:]
        raise RuntimeError(f"{system.name} ended while it did {do!r}, with {system.process.wait()}:\n{log_tail}")
    answer = json.loads(line)
    if "failed" in answer:
        raise RuntimeError(f"{system.name} failed at {do!r}:\n{answer['failed']}")
    return answer["done"]


def close(system: System) -> None:
    system.process.stdin.close()
    system.process.wait()
