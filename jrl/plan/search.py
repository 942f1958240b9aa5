"""The layout of a run on a topology: mesh, micro-batch, rematerialisation, slots. Arithmetic first, then the compiler.

Every candidate is either refused with a reason or has a time; the fastest are compiled, and what the compiler says does
not fit is refused too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jrl.experiment import Config
from jrl.parts import Parts
from jrl.plan import budget, estimate
from jrl.plan.case import make_case
from jrl.plan.chips import GIB, Topology
from jrl.sharding import MeshShape

SLOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROWS = (1, 2, 4, 8)  # packed rows of a micro-batch on one batch shard
REMAT = ("none", "layer")


class Candidate(NamedTuple):
    """One layout: what it sets, its time where arithmetic lets it stand, or why it was refused."""

    bindings: Mapping[str, Any]
    config: Config | None  # None: it cannot be laid out
    gib: float | None  # of the largest program on one device
    step_seconds: float | None
    refused: str | None


def candidates(config: Config, parts: Parts, topology: Topology) -> list[Candidate]:
    """Returns every layout: those that may fit, fastest first, then the refused."""
    found = [judged(config, parts, topology, bindings) for bindings in layouts(config, parts, topology)]
    return sorted(found, key=lambda c: (c.refused is not None, c.step_seconds or 0.0, c.gib or 0.0))


def layouts(config: Config, parts: Parts, topology: Topology) -> Iterator[dict[str, Any]]:
    """Yields bindings: every mesh that uses all devices, and for each that can be laid out every smaller choice."""
    for mesh in meshes(topology.num_devices):
        over = {f"MeshShape.{axis}": size for axis, size in mesh.items()}
        try:
            case = make_case(applied(config, over), parts, topology.num_devices)
        except ValueError:
            yield over
            continue
        local = case.sequences // case.shards
        slots = sorted({min(n, local) for n in SLOTS})
        for rows in sorted({min(n, local) for n in ROWS}):
            for remat in REMAT:
                for n in slots:
                    yield {
                        **over,
                        "Learner.micro_batch_tokens": rows * case.shape.row_length * case.shards,
                        "Decoder.remat": remat,
                        "Sampler.slots": n,
                    }


def meshes(num_devices: int) -> Iterator[dict[str, int]]:
    """Yields every way to multiply data, fsdp and tensor to the number of devices."""
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for tensor in divisors:
        for fsdp in divisors:
            if num_devices % (tensor * fsdp) == 0:
                yield {"data": num_devices // (tensor * fsdp), "fsdp": fsdp, "tensor": tensor}


def applied(config: Config, bindings: Mapping[str, Any]) -> Config:
    """Returns the configuration with bindings of a layout over it."""
    places = {"MeshShape": "mesh", "Learner": "learner", "Decoder": "model", "Sampler": "sampler"}
    fields: dict[str, dict[str, Any]] = {}
    for name, value in bindings.items():
        section, field = name.split(".")
        fields.setdefault(places[section], {})[field] = value
    if "mesh" in fields:
        fields["mesh"] = {**dataclasses.asdict(MeshShape()), **fields["mesh"]}
    changed = {place: dataclasses.replace(getattr(config, place), **new) for place, new in fields.items()}
    return dataclasses.replace(config, **changed)


def judged(config: Config, parts: Parts, topology: Topology, bindings: Mapping[str, Any]) -> Candidate:
    """Returns a layout with its time, or the reason against it."""
    try:
        over = applied(config, bindings)
        case = make_case(over, parts, topology.num_devices)
    except ValueError as error:
        return Candidate(bindings, None, None, None, str(error))
    name, size = budget.peak(case)
    limit = topology.chip.limit_bytes
    if size > limit:
        refused = f"{name} takes {size / GIB:.2f} of {limit / GIB:.2f} GiB a device, by arithmetic"
        return Candidate(bindings, over, size / GIB, None, refused)
    return Candidate(bindings, over, size / GIB, estimate.step_seconds(case, topology.chip), None)


def words(bindings: Mapping[str, Any]) -> list[str]:
    """Returns bindings as `jrl train` takes them."""
    return [f"{name}={value!r}" for name, value in bindings.items()]


def gin_text(bindings: Mapping[str, Any], told: str) -> str:
    """Returns bindings as a gin file that can be included."""
    return "".join([f"# {told}\n", *(f"{line.replace('=', ' = ', 1)}\n" for line in words(bindings))])
