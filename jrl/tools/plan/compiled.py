"""Compiles a run's programs for a topology through libtpu, without devices, and reads their memory.

libtpu is one wheel: `pip install "jrl-jax[tpu]"`. The command line sets the environment variables that it needs: see
`jrl.tools.plan.libtpu`. Results are cached; the key contains the program's text and the topology.

Memory is read from the compiler's buffer assignment, which it can dump into a folder. The temporary memory in JAX's
`memory_analysis` is too large (libtpu 0.0.42.1), in updates by about the size of the donated arguments. By it an update
of 32B took 115 GiB of a chip's 95, yet the compiler, which refuses what does not fit, had compiled it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from jrl import paths
from jrl.device.cache_home import cache_home
from jrl.device.program_cache import COMPILER_OPTIONS
from jrl.device.sharding import MeshShape, make_mesh
from jrl.tools.plan.chips import Topology

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
CACHE_FORMAT = 3
ANNOUNCE_SECONDS = 60  # between messages about programs that are still being compiled
HOST_COLOR = r"\bcolor 5\b"  # S(5) in a program's text; the compiler's report calls it cmem


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiler's memory report of one program, bytes on one device. If it does not fit, only `needed` is set."""

    arguments: int = 0
    outputs: int = 0  # not including those in donated arguments
    temporary: int = 0
    code: int = 0
    host: int = 0  # in host memory, not part of the total
    needed: int | None = None  # HBM that the program would need, if it does not fit
    compile_seconds: float = 0.0
    # The scheduled program, from which `jrl.tools.plan.counted` computes the time; None if no code was generated.
    text: str | None = dataclasses.field(default=None, repr=False)

    @property
    def total(self) -> int:
        return self.needed if self.needed is not None else self.arguments + self.outputs + self.temporary + self.code


def libtpu_version() -> str | None:
    """Returns the version of libtpu; None if it is not installed."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def topology_mesh(topology: Topology, shape: MeshShape) -> Mesh:
    """Returns the mesh over a topology's devices. Raises ValueError for a grid that libtpu does not know."""
    return make_mesh(shape, topology_devices(topology))


def topology_devices(topology: Topology) -> list[Any]:
    """Returns a topology's devices. Raises ValueError for a grid that libtpu does not know."""
    grid = (*topology.grid, *[1] * (3 - len(topology.grid)))
    chips_per_host = tuple(min(2, n) for n in grid[:2]) + (1,)
    try:
        description = topologies.get_topology_desc(
            platform="tpu",
            topology_name=f"{topology.chip.platform}:{'x'.join(map(str, topology.grid))}",
            chips_per_host_bounds=chips_per_host,
            num_slices=topology.slices,
            **topology.chip.options,
        )
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"libtpu has no topology {topology.name}: {str(error).splitlines()[0]}") from error
    return list(description.devices)


def compile_all(
    lowered: Mapping[str, Any],
    topology: Topology,
    announce: Callable[[str, Compiled, bool], None],
    announce_wait: Callable[[Sequence[str], float], None],
) -> dict[str, Compiled]:
    """Returns the compiler's report of every program, compiling two at a time.

    Args:
      announce: called with the name of each program, its report, and whether it came from the cache.
      announce_wait: called every minute in which none was finished, with the names of those being compiled and the
        seconds since the first began.
    """
    size = lambda name: len(lowered[name].as_text())
    order = sorted(lowered, key=size, reverse=True)  # the longest first, to finish all as early as possible
    results, start = {}, time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = {pool.submit(compile_one, lowered[name], topology): name for name in order}
        waiting = set(futures)
        while waiting:
            done, waiting = concurrent.futures.wait(
                waiting, ANNOUNCE_SECONDS, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for one in done:
                name = futures[one]
                results[name], cached = one.result()
                announce(name, results[name], cached)
            running = [name for future, name in futures.items() if future.running()]
            if running and not done:
                announce_wait(running, time.monotonic() - start)
    return {name: results[name] for name in lowered}


def compile_one(lowered: Any, topology: Topology) -> tuple[Compiled, bool]:
    """Returns the compiler's report of one program, and whether it came from the cache."""
    options = COMPILER_OPTIONS[topology.chip.device_kind]
    compile_ = functools.partial(compile_now, options=options)
    return cached_or(compile_, lowered, cache_file(lowered.as_text(), topology, f"compiled {options}"))


def cached_or(ask: Callable[[Any], Compiled], lowered: Any, place: Path | None) -> tuple[Compiled, bool]:
    """Returns the report cached at `place`, or a new one, which is then cached; and whether it came from the cache."""
    if place is not None and (cached := read_cached(place)) is not None:
        return cached, True
    result = ask(lowered)
    if place is not None:
        paths.make_dir(place.parent)
        if result.text is not None:
            paths.write_bytes_atomic(_text_file(place), gzip.compress(result.text.encode()))
        without_text = dataclasses.replace(result, text=None)
        paths.write_bytes_atomic(place, json.dumps(dataclasses.asdict(without_text)).encode())
    return result, False


def compile_now(lowered: Any, options: Mapping[str, Any] = MappingProxyType({})) -> Compiled:
    """Returns the compiler's report of one program after a full compilation with these options."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jrl-plan-") as folder:
        try:
            compiled = lowered.compile(compiler_options={**options, **writing_to(folder)})
        except jax.errors.JaxRuntimeError as error:
            return refused(error, start)
        memory, text = assignment(folder), scheduled(folder)
    if memory is None:
        raise RuntimeError(f"libtpu {libtpu_version()} wrote no buffer assignment of a program")
    code = compiled.memory_analysis().generated_code_size_in_bytes
    return dataclasses.replace(memory, code=code, compile_seconds=time.monotonic() - start, text=text)


def writing_to(folder: str) -> dict[str, Any]:
    """Returns the compiler options that dump its reports into a folder."""
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}


def refused(error: jax.errors.JaxRuntimeError, start: float) -> Compiled:
    """Returns the report of a program that does not fit in HBM. Raises `error` if it has another cause."""
    needed = hbm_asked(str(error))
    if needed is None:
        raise error
    return Compiled(needed=needed, compile_seconds=time.monotonic() - start)


def assignment(folder: str) -> Compiled | None:
    """Returns the memory of a program from the buffer assignment in a folder; None if it is missing or incomplete. If
    the program was compiled as several modules, the largest counts."""
    largest = None
    for report in Path(folder).glob("*memory-usage-report.txt"):
        buffers = report.with_name(report.name.replace("memory-usage-report", "buffer-assignment"))
        if not buffers.exists():
            return None
        read = hbm_assigned(buffers.read_text(encoding="utf-8"))
        if read.total != hbm_total(report.read_text(encoding="utf-8")):
            return None  # still being written
        largest = read if largest is None or read.total > largest.total else largest
    return largest


def scheduled(folder: str) -> str | None:
    """Returns the text of the scheduled program in a folder, the longest of several modules; None if there is none."""
    texts = [path.read_text(encoding="utf-8") for path in Path(folder).glob("*after_codegen.txt")]
    return max(texts, key=len, default=None)


def hbm_assigned(text: str) -> Compiled:
    """Returns the bytes of a buffer assignment in HBM, which is memory space 0 and has no color in the text, and in
    host memory."""
    sizes, host = {"parameter": 0, "live-out": 0, "": 0}, 0
    for size, what in re.findall(r"^allocation \d+: size (\d+), (.*)$", text, re.MULTILINE):
        if "color" not in what:
            sizes[next(kind for kind in sizes if kind in what)] += int(size)
        elif re.search(HOST_COLOR, what):
            host += int(size)
    return Compiled(arguments=sizes["parameter"], outputs=sizes["live-out"], temporary=sizes[""], host=host)


def hbm_total(report: str) -> int | None:
    """Returns the bytes of memory space 0 in the compiler's report; None if it is missing."""
    match = re.search(r"^Memory Space: \S+ \(color=0\)\nTotal bytes: (\d+)", report, re.MULTILINE)
    return int(match[1]) if match else None


def hbm_asked(message: str) -> int | None:
    """Returns the HBM in bytes that a refused program would have used; None if the message has another cause."""
    # The second form appears if temporary arrays alone do not fit; it leaves out the arguments.
    asked = r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm|required for HLO temporaries \(([\d.]+)([KMGT]?)\)"
    match = re.search(asked, message)
    if match is None:
        return None
    size, unit = (group for group in match.groups() if group is not None)
    return int(float(size) * UNITS[unit])


def cache_file(text: str, topology: Topology, what: str) -> Path | None:
    """Returns the cache file of a program's text on a topology; None without a home directory."""
    if (home := cache_home(os.environ)) is None:
        return None
    flags = os.environ.get("LIBTPU_INIT_ARGS")
    parts = (CACHE_FORMAT, jax.__version__, libtpu_version(), topology.name, flags, what, text)
    return home / "plan" / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}.json"


def read_cached(place: Path) -> Compiled | None:
    """Returns the report cached by an earlier plan; None if it is missing or incomplete."""
    try:
        cached = Compiled(**json.loads(place.read_bytes()))
        if not _text_file(place).exists():
            return cached
        return dataclasses.replace(cached, text=gzip.decompress(_text_file(place).read_bytes()).decode())
    except (OSError, ValueError, TypeError, EOFError):
        return None


def _text_file(place: Path) -> Path:
    """Returns the path of a cached report's scheduled program."""
    return place.with_suffix(".hlo.gz")
