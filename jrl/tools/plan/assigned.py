"""Memory of programs without generating code: buffer assignment takes a tenth of the time of a full compilation.

The compiler cannot be stopped after buffer assignment, so it runs in a process that exits early:
`python -m jrl.tools.plan.assigned OUT.json TOPOLOGY PROGRAM,PROGRAM CONFIG [NAME=VALUE ...]`. The search uses this.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from jrl.device.program_cache import COMPILER_OPTIONS
from jrl.tools.plan import compiled, libtpu
from jrl.tools.plan.chips import Topology, parse_topology
from jrl.tools.plan.compiled import Compiled

POLL = 0.2  # seconds


def ask(source: Sequence[str], topology: Topology, names: Sequence[str]) -> dict[str, Compiled]:
    """Returns {program name: its memory} for the named programs of a run on a topology, without waiting for code
    generation.

    Args:
      source: the configuration and bindings, as on the command line.

    Raises: ValueError if the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="jrl-plan-") as folder:
        out = Path(folder) / "assigned.json"
        command = [sys.executable, "-m", "jrl.tools.plan.assigned", str(out), topology.name, ",".join(names), *source]
        # Removing the folder also removes files that the compiler is still writing when the process exits.
        environment = {**os.environ, **libtpu.ENVIRONMENT, "TMPDIR": folder}
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        if not out.exists():
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise ValueError(f"the compiler process failed: {' '.join(last)}")
        return {name: Compiled(**row) for name, row in json.loads(out.read_text(encoding="utf-8")).items()}


def assign_now(lowered: Any, options: Mapping[str, Any] = MappingProxyType({})) -> Compiled:
    """Returns a program's memory as soon as its buffers are assigned. The compilation continues in a thread."""
    start = time.monotonic()
    errors: list[jax.errors.JaxRuntimeError] = []
    with tempfile.TemporaryDirectory(prefix="jrl-plan-", ignore_cleanup_errors=True) as folder:

        def compile_() -> None:
            try:
                lowered.compile(compiler_options={**options, **compiled.writing_to(folder)})
            except jax.errors.JaxRuntimeError as error:
                errors.append(error)

        compilation = threading.Thread(target=compile_, daemon=True)
        compilation.start()
        while True:
            ended = not compilation.is_alive()
            if (memory := compiled.assignment(folder)) is not None:
                return dataclasses.replace(memory, compile_seconds=time.monotonic() - start)
            if errors:
                return compiled.refused(errors[0], start)
            if ended:
                raise RuntimeError(f"libtpu {compiled.libtpu_version()} wrote no buffer assignment of a program")
            time.sleep(POLL)


def main(out: str, topology: str, names: str, config: str, bindings: Sequence[str]) -> None:
    """Writes the memory of the named programs of a run, and exits the process even if it is still compiling."""
    from jrl.resolve import load_config
    from jrl.tools.plan.case import for_tpus, with_known_shape
    from jrl.tools.plan.shapes import lower, topology_meshes

    topology_ = parse_topology(topology)
    resolved, parts = load_config(config, bindings)
    resolved, _ = for_tpus(with_known_shape(resolved)[0], topology_.num_devices)
    lowered = lower(resolved, parts, *topology_meshes(resolved, topology_))

    def memory_of(name: str) -> Compiled:
        options = COMPILER_OPTIONS[topology_.chip.device_kind]
        path = compiled.cache_file(lowered[name].as_text(), topology_, f"assigned {options}")
        return compiled.cached_or(functools.partial(assign_now, options=options), lowered[name], path)[0]

    programs = names.split(",")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = dict(zip(programs, pool.map(memory_of, programs)))
    Path(out).write_text(json.dumps({name: dataclasses.asdict(row) for name, row in results.items()}), encoding="utf-8")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])
