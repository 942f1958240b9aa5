"""Plans a run on a topology: the memory and time of every program, and whether the run fits."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
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

# The trees of the run's state that are arguments of a program. The other trees are on the device too.
HOLDS = {"init": "nothing", "begin": "state", "update": "state", "update_critic": "state", "close": "state",
         "close_warmup": "state", "sample": "weights", "next_segment": "weights", "correct": "weights",
         "sample_eval": "weights", "recompute": "weights", "reference": "weights", "critic_values": "weights",
         "row_values": "weights", "scores": "weights", "step_scores": "weights", "prefer": "weights",
         "teacher": "weights"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """The plan of one program on one device."""

    name: str  # in the program cache
    memory: Memory  # as compiled if it was, else by arithmetic
    arithmetic: Memory | None  # None: arithmetic does not cover the program
    compiled: Compiled | None
    flops: float | None  # over all devices
    bytes: float | None  # between HBM and one device
    network: float | None  # bytes that one device receives from other slices
    estimate: Estimate | None
    collectives: list[dict[str, Any]] | None  # None: not counted
    count: HloCost | None = None  # by the compiler; None: not compiled, or arithmetic does not count the program

    @property
    def seconds(self) -> float | None:
        """Seconds of a call: by the compiler's count if there is one, else the minimum by arithmetic."""
        if self.count is not None:
            return self.count.seconds
        return None if self.estimate is None else self.estimate.seconds


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a run on a topology."""

    topology: Topology
    case: Case  # of the stage whose step is timed
    rows: list[ProgramPlan]
    limit: int  # bytes of HBM on one device
    step_seconds: float  # by the compiler's count where it compiled
    least_seconds: float  # by arithmetic: a lower bound
    changes: list[Change]  # suggested if the run does not fit
    notes: list[str]
    wastes: list[str]  # inefficiencies of programs

    @property
    def largest(self) -> ProgramPlan:
        return max(self.rows, key=lambda row: row.memory.total)

    def shown(self, row: ProgramPlan) -> str:
        """Returns the name of a row for reports."""
        return shown_name(self.case, row.name)

    @property
    def host(self) -> HostMemory:
        return max(map(budget.on_host, cases_of(self.case)), key=lambda memory: memory.total)

    @property
    def fits(self) -> bool:
        return self.largest.memory.total <= self.limit

    @property
    def network(self) -> Network | None:
        """The traffic of a step between slices; None on one slice."""
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
    """The traffic of a step of the case's stage between slices."""

    bytes: float  # received by one device, by arithmetic
    seconds: float  # at least
    counted_seconds: float | None  # of the transfers in the compiled programs; None if nothing was compiled
    bound: tuple[str, ...]  # programs whose bottleneck is the network


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
    """Returns the plan of a run. With libtpu every program is compiled; without it the plan is arithmetic only.

    Args:
      source: the configuration and bindings, as on the command line, for the process that counts collectives.
      say: called with progress messages.
      count: count collectives too.
      stage: the name of the only stage to plan; None: all stages.

    Raises: ValueError if the run cannot be laid out on the topology, or requires a kernel of another platform.
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
                how = "cached by an earlier plan" if cached else f"compiled in {program.compile_seconds:.0f} s"
                say(f"{shown_name(case, name)}: {how}")

            waiting = lambda names, seconds: say(waiting_text([shown_name(case, name) for name in names], seconds))
            compiled_programs = compiled.compile_all(lowered, topology, done, waiting)
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


def waiting_text(names: Sequence[str], seconds: float) -> str:
    """Returns what to say while programs are being compiled, `seconds` after the first began."""
    return f"still compiling {' and '.join(names)} ({seconds / 60:.0f} min)"


def step_of(case: Case, topology: Topology, rows: Sequence[ProgramPlan]) -> tuple[float, float]:
    """Returns the seconds of a step of the case's stage: by the compiler's count where it compiled, and by arithmetic,
    which is a lower bound."""
    of_stage = [row for row in rows if row.estimate is not None and split_name(row.name)[0] == case.name]
    return (
        estimate.step_of(case, topology.chip, {row.name: row.seconds for row in of_stage}),
        estimate.step_of(case, topology.chip, {row.name: row.estimate.seconds for row in of_stage}),
    )


def check_slices(config: Config, topology: Topology) -> None:
    """Raises ValueError unless the meshes of a run use as many slices as the topology has."""
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
    num_learner, num_sampler = (math.prod(each) for each in sizes)
    check_whole_slices((num_learner, num_sampler), (learner.slices, sampler.slices), [in_slice] * topology.slices)


def rows_of(
    case: Case,
    topology: Topology,
    compiled_programs: dict[str, Compiled],
    traffic_by_program: dict[str, list[dict[str, Any]]] | None,
) -> list[ProgramPlan]:
    """Returns a row for every compiled program and a restore or, if none was compiled, for those that arithmetic
    covers."""
    known, counts, traffic = budget.of_programs(case), flops.of_programs(case), estimate.of_programs(case)
    programs, calls = programs_of(case), estimate.calls(case)
    rows = []
    for name in [*compiled_programs, "restore"] if compiled_programs else known:  # nothing is compiled for a restore
        arithmetic, compiled_ = known.get(name), compiled_programs.get(name)
        memory = arithmetic
        if compiled_ is not None:
            memory = by_kind(name, compiled_, arithmetic, budget.resident_beside(case, name))
        has_matmuls = name in counts
        count = None
        if has_matmuls and compiled_ is not None and compiled_.text is not None:
            kind, program_case = programs[name]
            by_compiler = dict(kernels=kernel_seconds(kind, program_case, topology.chip), times=calls[name])
            memory_seconds = traffic[name].hbm / topology.chip.hbm_rate
            count = hlo_cost(compiled_.text, kind, program_case, topology.chip, memory=memory_seconds, **by_compiler)
        rows.append(
            ProgramPlan(
                name=name,
                memory=memory,
                arithmetic=arithmetic,
                compiled=compiled_,
                flops=counts[name].total if has_matmuls else None,
                bytes=traffic[name].hbm if has_matmuls else None,
                network=traffic[name].network if has_matmuls else None,
                estimate=estimate.estimate(counts[name], traffic[name], programs[name].case, topology.chip)
                if has_matmuls
                else None,
                collectives=None if traffic_by_program is None else traffic_by_program.get(name, []),
                count=count,
            )
        )
    return rows


def wastes_of(case: Case, bodies: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the inefficiencies of the programs, one sentence each.

    Args:
      bodies: what `jrl.tools.plan.collectives` writes, by program name.
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
    """Returns a compiled program's memory by kind, including the run's state.

    The compiler reports one number for arguments and one for a program's own arrays. Arithmetic splits the latter into
    gradients, activations and cache; the rest is temporary.
    """
    part = split_name(name)[1]
    sizes = {
        "nothing": 0,
        "state": resident.weights + resident.optimizer,
        "weights": min(resident.weights, program.arguments),
    }
    in_arguments = sizes[HOLDS.get(part, "nothing")]
    total = program.total + (resident.total - in_arguments if part != "init" else 0)
    if part == "begin" and arithmetic is not None:
        total += arithmetic.temporary - resident.temporary  # the state of the stage that ends is not an argument
    if part == "init":
        return resident._replace(temporary=max(total - resident.total, 0))
    by_arithmetic = {
        kind: getattr(arithmetic, kind) if arithmetic else 0 for kind in ("gradients", "activations", "cache")
    }
    rest = total - resident.total
    for kind, size in by_arithmetic.items():
        by_arithmetic[kind] = max(min(size, rest), 0)
        rest -= by_arithmetic[kind]
    return resident._replace(temporary=resident.temporary + max(rest, 0), **by_arithmetic)


class Counting:
    """A separate process that counts collectives. Must be closed."""

    def __init__(self, source: Sequence[str], case: Case, stage: str | None) -> None:
        devices = case.all_devices
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

        Raises: ValueError if the process failed.
        """
        if self._process.poll() is None:
            say("counting collectives on virtual CPU devices")
        start, code = time.monotonic(), None
        while code is None:
            try:
                code = self._process.wait(compiled.ANNOUNCE_SECONDS)
            except subprocess.TimeoutExpired:
                minutes = (time.monotonic() - start) / 60
                say(f"still counting collectives ({minutes:.0f} min); --no-collectives leaves them out")
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
    """Returns the output of `jrl plan --json`: memory in GiB per device, FLOPs over all devices, bytes of one."""
    p = publication_of(plan.case)
    sizes = {} if p is None else {k: v for k, v in p._asdict().items() if k != "held"}
    return {
        "fits": plan.fits,
        "hbm_gib": plan.largest.memory.total / GIB,
        "limit_gib": plan.limit / GIB,
        "checkpoint_gib": budget.checkpoint_bytes(plan.case) / GIB,
        "host_gib": {kind: size / GIB for kind, size in plan.host._asdict().items()},
        "step_seconds": plan.step_seconds,
        "least_step_seconds": plan.least_seconds,
        "network": None if plan.network is None else plan.network._asdict(),
        "publication_gib": None if p is None else {**{k: v / GIB for k, v in sizes.items()}, "peak": p.peak / GIB},
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
