"""A plan: every program of a run, what it takes on a topology, and whether that is there."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrl.experiment import Config
from jrl.models.attention.kernels import check_attention
from jrl.plugins import Parts
from jrl.tools.plan import budget, cheaper, compiled, estimate, flops, libtpu, waste
from jrl.tools.plan.budget import HostMemory, Memory
from jrl.tools.plan.case import BEFORE_RL, Case, before_rl, make_case, programs_of, uncounted, with_known_shape
from jrl.tools.plan.cheaper import Change
from jrl.tools.plan.chips import GIB, Topology
from jrl.tools.plan.compiled import Compiled
from jrl.tools.plan.estimate import Estimate

Say = Callable[[str], None]

# Which of the trees that a run keeps are among a program's arguments. The others are on the device all the same.
HOLDS = {"init": "nothing", "begin_rl": "state", "update": "state", "close": "state",
         "update_sft": "state", "close_sft": "state", "sample": "weights",
         "sample_eval": "weights", "logprobs": "weights", "values": "weights"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One program on one device."""

    name: str
    memory: Memory  # as compiled where it was, else by arithmetic
    arithmetic: Memory | None  # None where only the compiler knows
    compiled: Compiled | None
    flops: float | None  # over all devices
    bytes: float | None  # between HBM and one device
    estimate: Estimate | None
    collectives: list[dict[str, Any]] | None  # None: not counted


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `jrl plan` says of a run on a topology."""

    topology: Topology
    case: Case
    rows: list[Row]
    limit: int  # bytes of HBM on one device
    step_seconds: float
    changes: list[Change]  # where it does not fit
    notes: list[str]
    wastes: list[str]  # what a program does that it should not

    @property
    def largest(self) -> Row:
        return max(self.rows, key=lambda row: row.memory.total)

    @property
    def host(self) -> HostMemory:
        return budget.on_host(self.case)

    @property
    def fits(self) -> bool:
        return self.largest.memory.total <= self.limit


def make_plan(
    config: Config, parts: Parts, topology: Topology, source: Sequence[str], say: Say, *, count: bool = True
) -> Plan:
    """Returns the plan of a run. With libtpu every program is compiled; without it only arithmetic is done.

    Args:
      source: the configuration and bindings as the command line has them, for the process that counts collectives.
      say: told of progress.
      count: count collectives too.

    Raises: ValueError where the run cannot be laid out on the topology, or asks for a kernel of other devices.
    """
    config, told = with_known_shape(config)
    case = make_case(config, parts, topology.num_devices)
    check_attention(case.cfg, "tpu")
    notes = [line for line in (told, uncounted(config)) if line is not None]
    said: dict[str, Compiled] = {}
    counting = Counting(source, case) if count else None
    try:
        if compiled.libtpu_version() is None:
            notes.append("libtpu is not installed: nothing was compiled, memory is by arithmetic (pip install libtpu)")
        else:
            from jrl.tools.plan.shapes import lower

            say(f"tracing the programs for {topology.name}")
            lowered = lower(config, parts, compiled.topology_mesh(topology, config.mesh))
            say(f"compiling {len(lowered)} programs")
            done = lambda name, found, cached: say(
                f"{name}: {'known from an earlier plan' if cached else f'compiled in {found.compile_seconds:.0f} s'}"
            )
            said = compiled.compile_all(lowered, topology, done)
        found = counting.result(say) if counting is not None else None
    finally:
        if counting is not None:
            counting.close()
    if found is not None:
        devices = topology.num_devices
        notes.append(f"collectives are those of the same programs compiled for {devices} virtual CPU devices")
    counted = None if found is None else {name: body["collectives"] for name, body in found.items()}
    rows = rows_of(case, topology, said, counted)
    limit = topology.chip.limit_bytes
    calls = estimate.calls(case)
    seconds = sum(calls[row.name] * row.estimate.seconds for row in rows if row.estimate is not None)
    plan = Plan(topology, case, rows, limit, seconds, [], notes, wastes_of(case, found or {}))
    if plan.fits:
        return plan
    return dataclasses.replace(plan, changes=cheaper.cheapest(case, parts, limit, topology.num_devices, topology.chip))


def rows_of(
    case: Case, topology: Topology, said: dict[str, Compiled], found: dict[str, list[dict[str, Any]]] | None
) -> list[Row]:
    """Returns a row for every program that was compiled, or that arithmetic knows."""
    known, counts, traffic = budget.of_programs(case), flops.of_programs(case), estimate.of_programs(case)
    rows = []
    for name in [*said, "restore"] if said else known:  # nothing is compiled for a restore
        arithmetic, compiled_ = known.get(name), said.get(name)
        beside = budget.kept(before_rl(case) if name in BEFORE_RL else case)
        memory = arithmetic if compiled_ is None else by_kind(name, compiled_, arithmetic, beside)
        counted = name in counts
        rows.append(
            Row(
                name=name,
                memory=memory,
                arithmetic=arithmetic,
                compiled=compiled_,
                flops=counts[name].total if counted else None,
                bytes=traffic[name].hbm if counted else None,
                estimate=estimate.estimate(counts[name], traffic[name], case, topology.chip) if counted else None,
                collectives=None if found is None else found.get(name, []),
            )
        )
    return rows


def wastes_of(case: Case, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns what the programs do that they should not, a sentence each.

    Args:
      found: what the texts of the programs say, by name; see `jrl.tools.plan.collectives`.
    """
    said: list[str | None] = []
    for name, (kind, own) in programs_of(case).items():
        body = found.get(name)
        if body is None:
            continue
        if kind == "sample":
            said += waste.gathers_in_loop(name, own, body["collectives"])
            said.append(body["second_cache"])
        else:
            said.append(waste.full_logits(name, own, body["logits"]))
    return [line for line in said if line is not None]


def by_kind(name: str, found: Compiled, arithmetic: Memory | None, kept: Memory) -> Memory:
    """Returns a compiled program's memory by kind, with what the run keeps beside it.

    The compiler gives one number for arguments and one for what a program makes for itself. What of the latter are
    gradients, activations and cache is arithmetic; temporary is the rest.
    """
    held = {"nothing": 0, "state": kept.total, "weights": min(kept.weights, found.arguments)}[
        HOLDS.get(name, "nothing")
    ]
    others = kept.total - held if name != "init" else 0
    total = found.total + others
    if name == "init":
        return Memory(weights=kept.weights, optimiser=kept.optimiser, temporary=max(total - kept.total, 0))
    made = {kind: getattr(arithmetic, kind) if arithmetic else 0 for kind in ("gradients", "activations", "cache")}
    left = total - kept.total
    for kind, size in made.items():
        made[kind] = max(min(size, left), 0)
        left -= made[kind]
    return Memory(weights=kept.weights, optimiser=kept.optimiser, temporary=max(left, 0), **made)


class Counting:
    """The process that counts collectives, beside the compiler. Close it."""

    def __init__(self, source: Sequence[str], case: Case) -> None:
        devices = 1
        for size in case.sizes.values():
            devices *= size
        self._folder = tempfile.TemporaryDirectory(prefix="jrl-plan-")
        self._out = os.path.join(self._folder.name, "collectives.json")
        flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
        environment = {
            **{name: value for name, value in os.environ.items() if name not in libtpu.ENVIRONMENT},
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"]),
            "NPROC": str(max(16, 2 * devices)),
        }
        command = [sys.executable, "-m", "jrl.tools.plan.collectives", self._out, str(devices), *source]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self._said: list[bytes] = []
        self._reader = threading.Thread(target=lambda: self._said.append(self._process.stderr.read()), daemon=True)
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
            last = b"".join(self._said).decode(errors="replace").strip().splitlines()[-1:]
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
    """Returns what `jrl plan --json` prints. Memory in GiB a device, FLOPs of all devices, bytes of one."""
    return {
        "fits": plan.fits,
        "hbm_gib": plan.largest.memory.total / GIB,
        "limit_gib": plan.limit / GIB,
        "host_gib": {kind: size / GIB for kind, size in plan.host._asdict().items()},
        "step_seconds": plan.step_seconds,
        "notes": plan.notes,
        "wastes": plan.wastes,
        "programs": [
            {
                "name": row.name,
                "compiled": row.compiled is not None,
                "hbm": {kind: size / GIB for kind, size in row.memory._asdict().items()},
                "host": None if row.compiled is None else row.compiled.host / GIB,
                "flops": row.flops,
                "bytes": row.bytes,
                "collectives": row.collectives,
            }
            for row in plan.rows
        ],
    }
