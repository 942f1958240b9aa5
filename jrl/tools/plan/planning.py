"""A plan: the memory and time of every program of a run on a topology, and whether the run fits."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jrl.device.chips import GIB
from jrl.device.sharding import check_whole_slices, split_sizes
from jrl.experiment import Config
from jrl.models.attention.kernels import check_attention
from jrl.plugins import Parts
from jrl.run.kernels import sentence
from jrl.tools.plan import budget, cheaper, compiled, counted, estimate, flops, libtpu, waste
from jrl.tools.plan.budget import HostMemory, Memory
from jrl.tools.plan.case import (
    Case,
    cases_of,
    for_tpus,
    make_case,
    programs_of,
    publication_of,
    shown_name,
    split_name,
    uncounted,
    with_known_shape,
)
from jrl.tools.plan.cheaper import Change
from jrl.tools.plan.chips import Topology
from jrl.tools.plan.compiled import Compiled
from jrl.tools.plan.counted import HloCost, hlo_cost, kernel_seconds
from jrl.tools.plan.estimate import Estimate

Say = Callable[[str], None]

# Which trees of the run's state are arguments of a program. The others are on the device too.
HOLDS = {"init": "nothing", "begin": "state", "update": "state", "update_critic": "state", "close": "state",
         "close_warmup": "state", "sample": "weights", "next_segment": "weights", "correct": "weights",
         "sample_eval": "weights", "recompute": "weights", "reference": "weights", "critic_values": "weights",
         "row_values": "weights", "scores": "weights", "step_scores": "weights", "prefer": "weights",
         "teacher": "weights"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """One program on one device."""

    name: str  # in the program cache
    memory: Memory  # as compiled where it was, else by arithmetic
    arithmetic: Memory | None  # None where only the compiler knows
    compiled: Compiled | None
    flops: float | None  # over all devices
    bytes: float | None  # between HBM and one device
    network: float | None  # bytes that one device receives from other slices
    estimate: Estimate | None
    collectives: list[dict[str, Any]] | None  # None: not counted
    count: HloCost | None = None  # by the compiler; None where it compiled nothing, or where arithmetic does not count

    @property
    def seconds(self) -> float | None:
        """Of a call: by the compiler's count where there is one, else the least."""
        if self.count is not None:
            return self.count.seconds
        return None if self.estimate is None else self.estimate.seconds


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a run on a topology."""

    topology: Topology
    case: Case  # of the stage that `step_seconds` is of
    rows: list[ProgramPlan]
    limit: int  # bytes of HBM on one device
    step_seconds: float  # by the compiler's count where it compiled
    least_seconds: float  # by arithmetic: a bound from below
    changes: list[Change]  # where it does not fit
    notes: list[str]
    wastes: list[str]  # inefficiencies of programs

    @property
    def largest(self) -> ProgramPlan:
        return max(self.rows, key=lambda row: row.memory.total)

    def shown(self, row: ProgramPlan) -> str:
        """Returns a row's name as a text shows it."""
        return shown_name(self.case, row.name)

    @property
    def host(self) -> HostMemory:
        return max(map(budget.on_host, cases_of(self.case)), key=lambda memory: memory.total)

    @property
    def fits(self) -> bool:
        return self.largest.memory.total <= self.limit

    @property
    def network(self) -> Network | None:
        """What a step moves between slices; None on one slice."""
        if self.topology.slices == 1:
            return None
        times, rate = estimate.calls(self.case), self.topology.chip.network_rate
        rows = [row for row in self.rows if row.estimate is not None and split_name(row.name)[0] == self.case.name]
        p = publication_of(self.case)
        published = 0 if p is None else p.received
        received = published + sum(times[row.name] * row.network for row in rows)
        counted = [times[row.name] * row.count.network for row in rows if row.count is not None]
        bound = tuple(self.shown(row) for row in rows if row.estimate.bound == "network")
        return Network(received, received / rate, published / rate + sum(counted) if counted else None, bound)


class Network(NamedTuple):
    """What a step of the case's stage moves between slices."""

    bytes: float  # received by one device, by arithmetic
    seconds: float  # at least
    counted_seconds: float | None  # of what the compiler sends; None where nothing was compiled
    bound: tuple[str, ...]  # programs that nothing bounds more


def make_plan(
    config: Config,
    parts: Parts,
    topology: Topology,
    source: Sequence[str],
    say: Say,
    *,
    count: bool = True,
    stage: str | None = None,
) -> Plan:
    """Returns the plan of a run. With libtpu every program is compiled; without it only arithmetic is done.

    Args:
      source: the configuration and bindings as the command line has them, for the process that counts collectives.
      say: called with progress messages.
      count: count collectives too.
      stage: the name of the stage that is planned alone; None: all of them.

    Raises: ValueError where the run cannot be laid out on the topology, or asks for a kernel of other devices.
    """
    check_slices(config, topology)
    config, note = with_known_shape(config)
    config, choices = for_tpus(config, topology.num_devices)
    case = make_case(config, parts, topology.num_devices, stage, topology.slices)
    check_attention(case.cfg, "tpu")
    notes = [line for line in (note, uncounted(config), *map(sentence, choices)) if line is not None]
    compiled_programs: dict[str, Compiled] = {}
    counting = Counting(source, case, stage) if count else None
    try:
        if compiled.libtpu_version() is None:
            notes.append("libtpu is not installed: nothing was compiled, memory is by arithmetic (pip install libtpu)")
        else:
            from jrl.tools.plan.shapes import lower, topology_meshes

            say(f"tracing the programs for {topology.name}")
            lowered = lower(config, parts, *topology_meshes(config, topology), stage)
            say(f"compiling {len(lowered)} programs")

            def done(name: str, program: Compiled, cached: bool) -> None:
                how = "known from an earlier plan" if cached else f"compiled in {program.compile_seconds:.0f} s"
                say(f"{shown_name(case, name)}: {how}")

            compiled_programs = compiled.compile_all(lowered, topology, done)
        bodies = counting.result(say) if counting is not None else None
    finally:
        if counting is not None:
            counting.close()
    if bodies is not None:
        devices = topology.num_devices
        notes.append(f"collectives are those of the same programs compiled for {devices} virtual CPU devices")
    counted = None if bodies is None else {name: body["collectives"] for name, body in bodies.items()}
    rows = rows_of(case, topology, compiled_programs, counted)
    limit = topology.chip.limit_bytes
    seconds, least = step_of(case, topology, rows)
    wastes = wastes_of(case, bodies or {})
    wastes += [f"{shown_name(case, row.name)}: {line}" for row in rows if row.count for line in row.count.warnings]
    plan = Plan(topology, case, rows, limit, seconds, least, [], notes, wastes)
    if plan.fits:
        return plan
    return dataclasses.replace(plan, changes=cheaper.cheapest(case, parts, limit, topology.num_devices, topology.chip))


def step_of(case: Case, topology: Topology, rows: Sequence[ProgramPlan]) -> tuple[float, float]:
    """Returns the seconds of a step of the case's stage, by the compiler's count where it compiled, and at least."""
    of_stage = [row for row in rows if row.estimate is not None and split_name(row.name)[0] == case.name]
    return (
        estimate.step_of(case, topology.chip, {row.name: row.seconds for row in of_stage}),
        estimate.step_of(case, topology.chip, {row.name: row.estimate.seconds for row in of_stage}),
    )


def check_slices(config: Config, topology: Topology) -> None:
    """Raises ValueError where the meshes of a run are not on as many slices as the topology has."""
    learner, sampler = config.mesh, config.sampler_mesh
    if sampler is None or topology.slices == 1:
        asked = learner.slices if sampler is None else max(learner.slices, sampler.slices)
        if asked != topology.slices:
            raise ValueError(
                f"MeshShape.slices is {asked}, and {topology.name} has {topology.slices} "
                f"slice{'s' * (topology.slices > 1)}; set MeshShape.slices={topology.slices}, and MeshShape.data to a "
                "multiple of it"
            )
        return
    in_slice = topology.num_devices // topology.slices
    sizes = split_sizes(learner, sampler, topology.num_devices)
    learn, sample = (math.prod(each) for each in sizes)
    check_whole_slices((learn, sample), (learner.slices, sampler.slices), [in_slice] * topology.slices)


def rows_of(
    case: Case,
    topology: Topology,
    compiled_programs: dict[str, Compiled],
    traffic_by_program: dict[str, list[dict[str, Any]]] | None,
) -> list[ProgramPlan]:
    """Returns a row for every program that was compiled, or that arithmetic knows."""
    known, counts, traffic = budget.of_programs(case), flops.of_programs(case), estimate.of_programs(case)
    programs, calls = programs_of(case), estimate.calls(case)
    rows = []
    for name in [*compiled_programs, "restore"] if compiled_programs else known:  # nothing is compiled for a restore
        arithmetic, compiled_ = known.get(name), compiled_programs.get(name)
        memory = arithmetic
        if compiled_ is not None:
            memory = by_kind(name, compiled_, arithmetic, budget.resident_beside(case, name))
        multiplies = name in counts
        count = None
        if multiplies and compiled_ is not None and compiled_.text is not None:
            kind, own = programs[name]
            by_compiler = dict(kernels=kernel_seconds(kind, own, topology.chip), times=calls[name])
            memory_seconds = traffic[name].hbm / topology.chip.hbm_rate
            count = hlo_cost(compiled_.text, kind, own, topology.chip, memory=memory_seconds, **by_compiler)
        rows.append(
            ProgramPlan(
                name=name,
                memory=memory,
                arithmetic=arithmetic,
                compiled=compiled_,
                flops=counts[name].total if multiplies else None,
                bytes=traffic[name].hbm if multiplies else None,
                network=traffic[name].network if multiplies else None,
                estimate=estimate.estimate(counts[name], traffic[name], programs[name].case, topology.chip)
                if multiplies
                else None,
                collectives=None if traffic_by_program is None else traffic_by_program.get(name, []),
                count=count,
            )
        )
    return rows


def wastes_of(case: Case, bodies: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the inefficiencies of the programs, a sentence each.

    Args:
      bodies: what the texts of the programs say, by name; see `jrl.tools.plan.collectives`.
    """
    wastes: list[str | None] = []
    for name, (kind, stage_case) in programs_of(case).items():
        body = bodies.get(name)
        if body is None:
            continue
        if kind == "sample":
            wastes += waste.gathers_in_loop(shown_name(case, name), stage_case, body["collectives"])
            wastes.append(body["second_cache"])
        else:
            wastes.append(waste.full_logits(shown_name(case, name), stage_case, body["logits"]))
    return [line for line in wastes if line is not None]


def by_kind(name: str, program: Compiled, arithmetic: Memory | None, resident: Memory) -> Memory:
    """Returns a compiled program's memory by kind, with the run's state.

    The compiler gives one number for arguments and one for what a program makes for itself. What of the latter are
    gradients, activations and cache is arithmetic; temporary is the rest.
    """
    part = split_name(name)[1]
    sizes = {
        "nothing": 0,
        "state": resident.weights + resident.optimizer,
        "weights": min(resident.weights, program.arguments),
    }
    held = sizes[HOLDS.get(part, "nothing")]
    total = program.total + (resident.total - held if part != "init" else 0)
    if part == "begin" and arithmetic is not None:
        total += arithmetic.temporary - resident.temporary  # of the stage that ends, which is not an argument
    if part == "init":
        return resident._replace(temporary=max(total - resident.total, 0))
    by_arithmetic = {
        kind: getattr(arithmetic, kind) if arithmetic else 0 for kind in ("gradients", "activations", "cache")
    }
    left = total - resident.total
    for kind, size in by_arithmetic.items():
        by_arithmetic[kind] = max(min(size, left), 0)
        left -= by_arithmetic[kind]
    return resident._replace(temporary=resident.temporary + max(left, 0), **by_arithmetic)


class Counting:
    """A separate process that counts collectives. Must be closed."""

    def __init__(self, source: Sequence[str], case: Case, stage: str | None) -> None:
        devices = math.prod(case.sizes.values()) + math.prod((case.sampler_sizes or {"": 0}).values())
        self._folder = tempfile.TemporaryDirectory(prefix="jrl-plan-")
        self._out = os.path.join(self._folder.name, "collectives.json")
        flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
        environment = {
            **{name: value for name, value in os.environ.items() if name not in libtpu.ENVIRONMENT},
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"]),
            "NPROC": str(max(16, 2 * devices)),
        }
        command = [sys.executable, "-m", "jrl.tools.plan.collectives", self._out, str(devices), stage or "", *source]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self._stderr: list[bytes] = []
        self._reader = threading.Thread(target=lambda: self._stderr.append(self._process.stderr.read()), daemon=True)
        self._reader.start()

    def result(self, say: Say) -> dict[str, dict[str, Any]]:
        """Returns "collectives", "logits" and "second_cache" of every program, as `collectives` writes them.

        Raises: ValueError where the process failed.
        """
        if self._process.poll() is None:
            say("counting collectives on virtual CPU devices")
        code = self._process.wait()
        self._reader.join()
        if code != 0:
            last = b"".join(self._stderr).decode(errors="replace").strip().splitlines()[-1:]
            raise ValueError(f"collectives could not be counted: {' '.join(last)}")
        with open(self._out, encoding="utf-8") as file:
            return json.load(file)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stderr.close()
        self._folder.cleanup()


def to_json(plan: Plan) -> dict[str, Any]:
    """Returns the output of `jrl plan --json`. Memory in GiB a device, FLOPs of all devices, bytes of one."""
    p = publication_of(plan.case)
    named = {} if p is None else {k: v for k, v in p._asdict().items() if k != "held"}
    return {
        "fits": plan.fits,
        "hbm_gib": plan.largest.memory.total / GIB,
        "limit_gib": plan.limit / GIB,
        "host_gib": {kind: size / GIB for kind, size in plan.host._asdict().items()},
        "step_seconds": plan.step_seconds,
        "least_step_seconds": plan.least_seconds,
        "network": None if plan.network is None else plan.network._asdict(),
        "publication_gib": None if p is None else {**{k: v / GIB for k, v in named.items()}, "peak": p.peak / GIB},
        "notes": plan.notes,
        "wastes": plan.wastes,
        "programs": [
            {
                "name": split_name(row.name)[1],
                "stage": split_name(row.name)[0],
                "compiled": row.compiled is not None,
                "hbm": {kind: size / GIB for kind, size in row.memory._asdict().items()},
                "host": None if row.compiled is None else row.compiled.host / GIB,
                "flops": row.flops,
                "bytes": row.bytes,
                "network_bytes": row.network,
                "collectives": row.collectives,
                "least_seconds": None if row.estimate is None else row.estimate.seconds,
                "count": None if row.count is None else counted.to_json(row.count),
            }
            for row in plan.rows
        ],
    }
