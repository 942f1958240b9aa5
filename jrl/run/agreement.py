"""What the processes of a run must have in common before anything is compiled or written, and where they differ."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import jrl
from jrl import config as gin
from jrl import paths
from jrl.device.placement import processes_of
from jrl.device.processes import Processes, ProcessesDisagree
from jrl.experiment import Config
from jrl.plugins import Parts
from jrl.run.report.display import Display
from jrl.run.report.manifest import installed_packages

SEEN_SECONDS = 15  # how long a network file system may take to show a new folder to another machine


def facts(config: Config, parts: Parts, processes: Processes) -> dict[str, Any]:
    """Returns what all processes must agree on, by name; {} for one process."""
    if processes.count == 1:
        return {}
    configured = {f"configuration {name}": value for name, value in _leaves(gin.to_json(config))}
    parts_files = {f"parts file {name}": digest for name, digest in sorted(parts.hashes.items())}
    libraries = {f"version of {name}": version for name, version in installed_packages().items()}
    return {
        **configured,
        **parts_files,
        **libraries,
        "version of jrl": jrl.__version__,
        "source of jrl": source_digest(Path(jrl.__file__).parent),
        "version of python": platform.python_version(),
        "backend": jax.default_backend(),
        "kind of device": jax.local_devices()[0].device_kind,
        "devices of a process": jax.local_device_count(),
        "64-bit numbers": bool(jax.config.jax_enable_x64),
    }


def source_digest(package: Path) -> str:
    """Returns sha256 (hex) of the Python sources of a package, with their names."""
    digest = hashlib.sha256()
    for name in sorted(str(path.relative_to(package)) for path in package.rglob("*.py")):
        digest.update(f"{name}\n".encode())
        digest.update((package / name).read_bytes())
    return digest.hexdigest()[:16]


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None or not value:
        yield place, value
        return
    for name, item in items:
        yield from _leaves(item, f"{place}.{name}" if place else str(name))


def check_covered(mesh: Mesh, sampler_mesh: Mesh | None, processes: Processes) -> None:
    """Raises ValueError if the meshes leave out all devices of a process, or process 0 does not learn."""
    meshes = {"Config.mesh": mesh} | ({} if sampler_mesh is None else {"Config.sampler_mesh": sampler_mesh})
    without = sorted({*range(processes.count)}.difference(*map(processes_of, meshes.values())))
    if without:
        sizes = {name: {axis: n for axis, n in used_mesh.shape.items() if n > 1} for name, used_mesh in meshes.items()}
        named = " and ".join(f"{name} {size or '(one device)'}" for name, size in sizes.items())
        raise ValueError(
            f"{named} take "
            f"{sum(used_mesh.size for used_mesh in meshes.values())} of {jax.device_count()} devices, and none of "
            f"{processes.name(without[0])}; start fewer processes, or set MeshShape.data=-1"
        )
    if 0 not in processes_of(mesh):
        raise ValueError(
            f"{processes.name(0)}, which writes manifest and metrics, has no device of Config.mesh, which takes the "
            "first slices; start process 0 on one of them"
        )


def check_shared_folder(folder: Path, processes: Processes) -> None:
    """Returns once all processes see the run's folder. Raises ProcessesDisagree if one does not: with a folder on the
    local disk of each machine, the processes could not write a checkpoint together."""
    lock = folder / "lock"
    announces = processes.writer and processes.count > 1
    announced = processes.from_writer("folder", [lock.read_text(), str(folder)] if announces else None)
    if announced is None:
        return
    expected, writer_folder = announced
    end = time.monotonic() + SEEN_SECONDS
    while not (seen := paths.exists(lock) and lock.read_text() == expected) and time.monotonic() < end:
        time.sleep(0.1)
    blind = [i for i, sees in enumerate(processes.exchange("folder seen", seen)) if not sees]
    if blind:
        raise ProcessesDisagree(
            f"{processes.name(blind[0])} does not see {writer_folder} of {processes.name(0)}: the run's folder must be "
            "on a file system that all machines share"
        )


def with_place(display: Display, processes: Processes) -> Display:
    """Returns a display that also reports its phase and step to the other processes, in case this one is lost."""
    if processes.count == 1:
        return display

    def phase(text: str, *args: Any, **options: Any) -> None:
        processes.status.begin(text)
        display.phase(text, *args, **options)

    def step(metrics: Mapping[str, Any]) -> None:
        processes.status.ended(metrics["step"])
        display.step(metrics)

    return dataclasses.replace(display, phase=phase, step=step)


def journal_name(index: int) -> str:
    """Returns the name of the file of verdicts that a process writes."""
    return f"journal-{index}.jsonl" if index else "journal.jsonl"


def other_journals(folder: Path, index: int) -> list[Path]:
    """Returns the verdict files that other processes of this run have written, now or before a restart."""
    names = [name for name in paths.list_dir(folder) if name.startswith("journal") and name.endswith(".jsonl")]
    return [folder / name for name in names if name != journal_name(index)]
