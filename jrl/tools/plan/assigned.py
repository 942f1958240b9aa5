"""The memory of programs without their code: buffers are assigned in a tenth of the time of a whole compilation.

The compiler cannot be stopped there, so that it is asked in a process that leaves:
`python -m jrl.tools.plan.assigned OUT.json TOPOLOGY PROGRAM,PROGRAM CONFIG [NAME=VALUE ...]`. A search asks so.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jrl.tools.plan import compiled, libtpu
from jrl.tools.plan.chips import Topology, parse_topology
from jrl.tools.plan.compiled import Compiled

POLL = 0.2  # seconds


def ask(source: Sequence[str], topology: Topology, names: Sequence[str]) -> dict[str, Compiled]:
    """Returns the memory of some programs of a run on a topology, by name; no code is compiled.

    Args:
      source: the configuration and bindings, as the command line has them.

    Raises: ValueError where the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="jrl-plan-") as folder:
        out = Path(folder) / "assigned.json"
        command = [sys.executable, "-m", "jrl.tools.plan.assigned", str(out), topology.name, ",".join(names), *source]
        # What the compiler still writes when the process leaves goes with the folder.
        environment = {**os.environ, **libtpu.ENVIRONMENT, "TMPDIR": folder}
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        if not out.exists():
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise ValueError(f"the compiler could not be asked: {' '.join(last)}")
        return {name: Compiled(**row) for name, row in json.loads(out.read_text(encoding="utf-8")).items()}


def assign_now(lowered: Any) -> Compiled:
    """Returns a program's memory as soon as its buffers are assigned. The compilation goes on in a thread."""
    start = time.monotonic()
    errors: list[jax.errors.JaxRuntimeError] = []
    with tempfile.TemporaryDirectory(prefix="jrl-plan-", ignore_cleanup_errors=True) as folder:

        def compile_() -> None:
            try:
                lowered.compile(compiler_options=compiled.writing_to(folder))
            except jax.errors.JaxRuntimeError as error:
                errors.append(error)

        asked = threading.Thread(target=compile_, daemon=True)
        asked.start()
        while True:
            ended = not asked.is_alive()
            if (found := compiled.assignment(folder)) is not None:
                return dataclasses.replace(found, compile_seconds=time.monotonic() - start)
            if errors:
                return compiled.refused(errors[0], start)
            if ended:
                raise RuntimeError(f"libtpu {compiled.libtpu_version()} wrote no buffer assignment of a program")
            time.sleep(POLL)


def main(out: str, topology: str, names: str, config: str, bindings: Sequence[str]) -> None:
    """Writes the memory of some programs of a run, and ends the process with what is still being compiled in it."""
    from jrl.resolve import load_config
    from jrl.tools.plan.case import with_known_shape
    from jrl.tools.plan.shapes import lower

    place = parse_topology(topology)
    resolved, parts = load_config(config, bindings)
    resolved, _ = with_known_shape(resolved)
    lowered = lower(resolved, parts, compiled.topology_mesh(place, resolved.mesh))

    def one(name: str) -> Compiled:
        kept = compiled.cache_file(lowered[name].as_text(), place, "assigned")
        return compiled.kept_or(assign_now, lowered[name], kept)[0]

    wanted = names.split(",")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = dict(zip(wanted, pool.map(one, wanted)))
    Path(out).write_text(json.dumps({name: dataclasses.asdict(row) for name, row in found.items()}), encoding="utf-8")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])
