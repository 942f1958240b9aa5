"""The time of a compiled program on one device by the compiler's own cycle count, and the program's inefficiencies.

    seconds = max(max(compute + kernels, memory) + links that nothing overlaps, network)

compute: the compiler's cycles (`jrl.tools.plan.cycles`) at the chip's clock. The compiler counts neither collectives
nor Pallas kernels, nor copies that overlap with other work. Therefore:

links: the bytes that a device receives, at the rate of one ring, plus LATENCY for each collective. Asynchronous
collectives cost what exceeds the compute.
network: the bytes that a device receives from other slices, at its share of the host's network. The compiler overlaps
them with other work, a layer's gradients with the layer before it.
kernels: CALL_CYCLES for each call. In addition, 'ragged' reads the keys and values of its columns at the HBM rate;
'splash' computes its matmuls at KERNEL_SHARE of the matrix unit's peak; a kernel that reads a layer's weights reads
them at STREAM_SHARE of the HBM rate, of experts only those that a slot uses. The matmuls of experts, which are the
compiler's own kernel, and the gradients of their matrices take the longer of compute and memory.
memory: the bytes that the program must read and write (`estimate`), at the HBM rate.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.device.sharding import GATHERED
from jrl.models import expert_tiles
from jrl.models.attention.fused import MLP_LEAVES, QKV
from jrl.models.attention.kernels import LANES
from jrl.models.attention.kv_cache import cache_shapes
from jrl.models.contract import is_spec
from jrl.models.expert_group import CHUNK_SHARE, MIN_CHUNK
from jrl.rollout import sampler
from jrl.tools.plan import cycles, estimate, flops
from jrl.tools.plan.case import Case, learned_cases, shard_shape
from jrl.tools.plan.chips import Chip
from jrl.tools.plan.collectives import OPS, groups_of, ring_share
from jrl.tools.plan.cycles import ExecutionCount, HloModule, Instruction
from jrl.tools.plan.frequency import frequency

LATENCY = 1e-6  # seconds of the smallest collective: about one hop and its two barriers
CALL_CYCLES = 2122  # of an empty kernel: the least that the compiler assigns to any operation
STREAM_SHARE = 0.8  # of the HBM rate at which kernels read weights: blocks are prefetched, except the first
KERNEL_SHARE = 0.5  # of the matrix unit's peak that the attention kernel reaches
GRADIENT, ROWS_GRADIENT = "expert_gradient", "expert_rows_gradient"  # the names of the kernels
BETWEEN_SLICES = "xla_megascale_runtime"  # transfers arrays between slices, from host to host
DEAREST = 10  # most operations listed
SHOWN = 3  # most warnings of one kind
LEAST_SHARE = 1 / 200  # of a program's compute: anything cheaper is not reported
MIB = 2**20


class Operation(NamedTuple):
    """The instructions that come from one place in the traced program."""

    name: str  # the place: scopes and primitive
    what: str  # operation and type of the first one
    times: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class HloCost:
    """The cost of one call of a program on one device; times are in seconds."""

    compute: float  # with the expected frequency of every branch
    compute_dearest: float  # with the most expensive branch of every condition
    kernels: float
    memory: float  # by arithmetic
    links: float  # of collectives that nothing overlaps
    links_overlapped: float  # of asynchronous collectives
    network: float  # of data from other slices, overlapped with other work
    instructions: float  # fusions, copies and kernels that run
    float32_share: float  # share of the matrix unit's passes for matmuls with a float32 operand
    gathers_in_loops: float  # synchronous all-gathers in loops
    decode_step: float | None  # seconds of one decode step; None: the program does not decode
    decode_operations: float | None  # fusions, copies and kernels of a decode step
    dearest: tuple[Operation, ...]
    warnings: tuple[str, ...]

    @property
    def seconds(self) -> float:
        work = max(self.compute + self.kernels, self.memory)
        return max(work + self.links + max(self.links_overlapped - work, 0.0), self.network)


def to_json(cost: HloCost) -> dict[str, Any]:
    """Returns the fields of a cost for `jrl plan --json`; times are seconds per call."""
    return {
        "seconds": cost.seconds,
        **dataclasses.asdict(cost),
        "dearest": [operation._asdict() for operation in cost.dearest],
    }


def hlo_cost(text: str, kind: str, case: Case, chip: Chip, kernels: float, memory: float, times: float) -> HloCost:
    """Returns the cost of a program by the compiler's count.

    Args:
      text: the scheduled program, `*after_codegen.txt`.
      kind: see `case.PlannedProgram`.
      kernels, memory: seconds per call, by arithmetic.
      times: calls per step, for warnings.
    """
    program = cycles.parse(text)
    runs = cycles.runs(program, frequency(kind, case))
    clock = chip.clock_rate
    compute, dearest = (sum(run.instruction.cycles * getattr(run, which) for run in runs) / clock
                        for which in ("likely", "dearest"))  # fmt: skip
    links, overlapped = link_seconds(program, runs, chip, case.devices)
    calls = sum(run.likely for run in runs if is_kernel(run.instruction))
    step = operations = None
    if kind == "sample":
        steps = case.decode_steps
        inside = [run for run in runs if any(cycles.scope_of(loop) == sampler.DECODE for loop in run.loops)]
        waits, _ = link_seconds(program, inside, chip, case.devices)
        streamed = streamed_seconds(inside, case, chip)
        in_step = sum(run.likely * (CALL_CYCLES if is_kernel(run.instruction) else run.instruction.cycles)
                      for run in inside) / clock  # fmt: skip
        experts = expert_seconds(program, inside, case, chip) + decoded_seconds(inside, case, chip)
        busy_seconds = in_step + streamed + ragged_seconds(case, chip) + experts
        step = max(busy_seconds / steps, read_bytes(case) / chip.hbm_rate) + waits / steps
        operations = sum(run.likely for run in inside if is_operation(run.instruction)) / steps
    passes = by_dtypes(program, runs)
    all_passes = sum(passes.values()) or 1.0
    return HloCost(
        compute=compute,
        compute_dearest=dearest,
        kernels=kernels
        + streamed_seconds(runs, case, chip)
        + expert_seconds(program, runs, case, chip)
        + decoded_seconds(runs, case, chip)
        + calls * CALL_CYCLES / clock,
        memory=memory,
        links=links,
        links_overlapped=overlapped,
        network=network_seconds(runs, chip, case.mesh_slices),
        decode_step=step,
        decode_operations=operations,
        instructions=sum(run.likely for run in runs if is_operation(run.instruction)),
        float32_share=sum(n for dtypes, n in passes.items() if "f32" in dtypes) / all_passes,
        gathers_in_loops=sum(r.likely for r in runs if r.instruction.op == "all-gather" and r.loops),
        dearest=dearest_operations(runs, clock),
        warnings=tuple(warnings_of(program, runs, case, chip, times)),
    )


def kernel_seconds(kind: str, case: Case, chip: Chip) -> float:
    """Returns the seconds of a program's attention kernels without their launch, by the model above."""
    cfg, devices, total = case.cfg, case.devices, 0.0
    if kind == "sample":
        if cfg.attention == "splash":
            total += flops.prefill_attention(case).weights
        return ragged_seconds(case, chip) + total / devices / (KERNEL_SHARE * chip.matrix_rate)
    if cfg.attention == "splash":
        recomputed = 0 if cfg.remat in ("none", "dots") else 1  # 'dots' saves the kernel's output
        for rows in learned_cases(case) if kind == "update" else [case]:
            tokens = rows.micro_batches * rows.shape.rows * rows.shape.row_length
            attended = flops.of_rows(cfg, tokens, rows.shape.keys, flops.carried(rows)).weights
            total += attended * (1 + 3.5 + recomputed if kind == "update" else 1)
    return total / devices / (KERNEL_SHARE * chip.matrix_rate)


def ragged_seconds(case: Case, chip: Chip) -> float:
    """Returns the seconds in which ragged attention reads the cache, over all decode steps; 0 without that kernel."""
    if case.config.sampler.attention != "ragged":
        return 0.0
    read = estimate.kv_cache_bytes(case, case.slots, round(flops.read_columns(case)))
    return case.decode_steps * read / chip.hbm_rate


def streamed_seconds(runs: Iterable[ExecutionCount], case: Case, chip: Chip) -> float:
    """Returns the seconds in which the kernels that a program calls read weights."""
    cfg, tensor = case.cfg, case.sizes["tensor"]
    heads = (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim
    num_elements = {"fused_mlp": 3 * cfg.width * cfg.mlp_width / tensor, "fused_qkv": cfg.width * heads / tensor}
    if flops.decodes_unmerged(case):
        # A and B of every matrix that has an adapter. Queries, keys and values share one A, and one B with zeros in it.
        ranks = {name: leaf["a"].shape[-1] for name, leaf in case.adapters.items()}
        of_mlp, of_heads = (sum(ranks.get(name, 0) for name in names) for names in (MLP_LEAVES[1:], QKV))
        num_elements["fused_mlp"] += of_mlp * (cfg.width + cfg.mlp_width / tensor)
        num_elements["fused_qkv"] += of_heads * (cfg.width + heads / tensor)
    total = 0.0
    for run in runs:
        if is_kernel(run.instruction):
            total += sum(run.likely * n for name, n in num_elements.items() if f"/{name}" in run.instruction.op_name)
    return total * jnp.dtype(cfg.dtype).itemsize / (STREAM_SHARE * chip.hbm_rate)


def expert_seconds(program: HloModule, runs: Iterable[ExecutionCount], case: Case, chip: Chip) -> float:
    """Returns the seconds of the matmuls of rows sorted by expert (`ragged_dot`), for which the compiler generates a
    kernel, and of the gradients of the experts' matrices and of their rows, in our own kernels. All multiply a tile of
    rows with each of the tile's experts. Experts are used evenly."""
    total, itemsize = 0.0, jnp.dtype(case.cfg.dtype).itemsize
    padded = lambda size: -(-size // LANES) * LANES  # the last dimension of an array, in memory and in the matrix unit
    for run in runs:
        tiling = re.search(r'ragged_dot_tiling="(\d+)', run.instruction.attributes)
        of_gradient, of_rows = (f"/{name}/" in run.instruction.op_name for name in (GRADIENT, ROWS_GRADIENT))
        if not is_kernel(run.instruction) or not (tiling or of_gradient or of_rows):
            continue
        around, result = program.computations[run.computation], run.instruction.shapes[0]
        last = next(around[name].shapes[0] for name in reversed(run.instruction.operands) if name in around)
        if of_gradient:
            (count, inputs, columns), rows = result.dims, last.dims[0]
            by_in, by_out = (expert_tiles.columns_at_once(size, itemsize) for size in (inputs, columns))
        else:
            (rows, _), (count, inputs, columns) = result.dims, last.dims
            by_in, by_out = expert_tiles.matrix_block(inputs, columns, itemsize) if of_rows else (inputs, columns)
        tile, filled = int(tiling[1]) if tiling else expert_tiles.ROWS, filled_rows(rows, case)
        visited = count * (1 - (1 - 1 / count) ** filled)
        visits = filled / tile + visited
        computed = visits * tile * 2 * padded(inputs) * padded(columns)
        # The gradient of an expert without rows is written too. Blocks that are summed over take turns at every visit.
        matrices = count if of_gradient else visits if of_rows and by_out < columns else visited
        # A tile of either operand is read for each column block of the other one; a sum over blocks is written once.
        times_in, times_out = 1 if of_rows else -(-columns // by_out), -(-inputs // by_in)
        entries = matrices * inputs * padded(columns) + filled * (
            padded(inputs) * times_in + padded(columns) * times_out
        )
        moved = itemsize * entries
        total += run.likely * max(computed / (KERNEL_SHARE * chip.matrix_rate), moved / (STREAM_SHARE * chip.hbm_rate))
    return total


def decoded_seconds(runs: Iterable[ExecutionCount], case: Case, chip: Chip) -> float:
    """Returns the seconds of the experts' decode kernel: the longer of reading the experts that any slot uses, and of
    multiplying every slot's token with each of them."""
    calls = sum(
        run.likely for run in runs if is_kernel(run.instruction) and "/fused_experts" in run.instruction.op_name
    )
    if not calls:
        return 0.0
    cfg, rows = case.cfg, case.slots * case.sizes["expert"]
    visited = cfg.experts.count / case.sizes["expert"] * (1 - (1 - cfg.experts.per_token / cfg.experts.count) ** rows)
    entries = 3 * cfg.width * cfg.experts.width / case.sizes["tensor"]
    read = entries * jnp.dtype(cfg.dtype).itemsize / (STREAM_SHARE * chip.hbm_rate)
    return calls * visited * max(read, 2 * rows * entries / (KERNEL_SHARE * chip.matrix_rate))


def filled_rows(rows: int, case: Case) -> float:
    """Returns how many of the rows that experts multiply contain a token."""
    shards, (more, even) = case.sizes["expert"], CHUNK_SHARE
    if shards == 1:
        return rows
    return rows * even / more if rows > MIN_CHUNK else rows / shards


def read_bytes(case: Case) -> float:
    """Returns the bytes that a decode step must read on one device: weights, and the filled part of the cache."""
    cache = estimate.kv_cache_bytes(case, case.slots, round(flops.read_columns(case)))
    return estimate.decode_step_bytes(case) + cache


def is_operation(instruction: Instruction) -> bool:
    """Returns whether the device executes an instruction as a separate operation."""
    return bool(instruction.cycles) or is_kernel(instruction)


def is_kernel(instruction: Instruction) -> bool:
    return instruction.op == "custom-call" and "tpu_custom_call" in instruction.attributes


def link_seconds(program: HloModule, runs: Iterable[ExecutionCount], chip: Chip, devices: int) -> tuple[float, float]:
    """Returns the seconds of the collectives that the program waits for, and of those that overlap with other work."""
    waits = overlapped = 0.0
    for run in runs:
        for instruction in collectives_of(program, run.instruction):
            seconds = run.likely * (LATENCY + received(instruction, devices) / chip.ring_rate)
            begun = instruction.name != run.instruction.name  # by a fusion
            if begun or instruction.op.endswith("-start") or "async" in run.computation:
                overlapped += seconds
            else:
                waits += seconds
    return waits, overlapped


def network_seconds(runs: Iterable[ExecutionCount], chip: Chip, slices: int) -> float:
    """Returns the seconds in which a device receives data from other slices; 0 on one slice."""
    # The hosts of S slices sum an array in parts: each receives S - 1 copies of its own part, then the other parts. In
    # a gather, each already has one of S parts.
    part = (slices - 1) / slices
    total = 0.0
    for instruction, times in ((run.instruction, run.likely) for run in runs):
        if instruction.op == "recv" and BETWEEN_SLICES in instruction.attributes:
            kind = re.search(r'transfer_type="(\w+)"', instruction.attributes)
            # Any other kind, or one without a name, moves the array from one slice to another.
            share = {"ALL_REDUCE": 2 * part, "ALL_GATHER": part}.get(kind[1] if kind else "", 1.0)
            total += times * share * instruction.shapes[0].bytes
    return total / chip.network_rate if total else 0.0  # of some chips no rate is published


def collectives_of(program: HloModule, instruction: Instruction) -> list[Instruction]:
    """Returns [instruction] if it is a collective, or the asynchronous collectives that a fusion starts; else []. A
    reduce-scatter is a fusion of an all-reduce with the slice that a device keeps."""
    if instruction.op.removesuffix("-start") in OPS:
        return [instruction]
    inside = program.computations.get(instruction.called or "", {}) if instruction.op == "fusion" else {}
    if any("AsyncCollectiveStart" in inner.attributes for inner in inside.values()):
        return [inner for inner in inside.values() if inner.op in OPS]
    sums = [inner for inner in inside.values() if inner.op == "all-reduce"]
    return [dataclasses.replace(instruction, op="reduce-scatter", attributes=each.attributes) for each in sums[:1]]


def received(instruction: Instruction, devices: int) -> float:
    """Returns the bytes that a device receives in a collective."""
    op, arrays = instruction.op.removesuffix("-start"), instruction.shapes
    if instruction.op.endswith("-start"):  # its result also has its operands and scalars of the runtime
        arrays = tuple(array for array in arrays if array.dims)
        arrays = arrays[len(arrays) // 2 :] if op != "all-reduce" else arrays
    size = sum(array.bytes for array in arrays)
    n = len(groups_of(instruction.attributes, devices)[0]) if "replica_groups" in instruction.attributes else 2
    return size * ring_share(op, n)


def by_dtypes(program: HloModule, runs: Iterable[ExecutionCount]) -> dict[tuple[str, str], float]:
    """Returns {dtypes of a matmul's operands: its operations times passes of the matrix unit, summed}."""
    total: dict[tuple[str, str], float] = {}
    for run in runs:
        for product in cycles.products(program, run.instruction):
            total[product.dtypes] = total.get(product.dtypes, 0.0) + run.likely * product.flops * product.passes
    return total


def dearest_operations(runs: Iterable[ExecutionCount], clock: float) -> tuple[Operation, ...]:
    """Returns the most expensive operations, merged by their place in the traced program."""
    total: dict[str, Operation] = {}
    for run in runs:
        instruction = run.instruction
        if not instruction.cycles or not run.likely:
            continue
        name = instruction.op_name or f"{instruction.name} (the compiler's own)"
        what = f"{instruction.op} {instruction.result.split('{')[0].lstrip('(')}"
        before = total.get(name, Operation(name, what, 0.0, 0.0))
        total[name] = before._replace(
            times=before.times + run.likely, seconds=before.seconds + run.likely * instruction.cycles / clock
        )
    return tuple(sorted(total.values(), key=lambda operation: -operation.seconds)[:DEAREST])


def warnings_of(
    program: HloModule, runs: Iterable[ExecutionCount], case: Case, chip: Chip, times: float
) -> Iterable[str]:
    """Yields a sentence on each inefficiency of a program, with its cost per step, the most expensive of a kind
    first."""
    checks = (copies, synchronous_gathers, float32_products, square_buffers)
    least = LEAST_SHARE * sum(run.likely * run.instruction.cycles for run in runs) / chip.clock_rate
    for check in checks:
        findings = sorted(check(program, runs, case, chip), key=lambda row: -row[1])
        findings = [row for row in findings if row[1] >= least]
        for what, seconds in findings[:SHOWN]:
            yield f"{what}: {1e3 * seconds * times:.3g} ms a step"
        if len(findings) > SHOWN:
            rest = sum(seconds for _, seconds in findings[SHOWN:])
            yield f"and {len(findings) - SHOWN} more like it: {1e3 * rest * times:.3g} ms a step"


def copies(program: HloModule, runs: Iterable[ExecutionCount], case: Case, chip: Chip) -> list[tuple[str, float]]:
    """Returns the copies inside loops that are larger than one layer's cache, and those of weights, of at least 1 MiB,
    into another layout, with their seconds."""
    caches, weights = cache_sizes(case), weight_sizes(case)
    layer_entries = min((entries for _, entries in caches), default=math.inf)
    findings = []
    for run in in_loops(runs, "copy"):
        array = run.instruction.shapes[0]
        dims = tuple(sorted(n for n in array.dims if n > 1))
        seconds = run.likely * run.instruction.cycles / chip.clock_rate
        where = f"{array.dtype}[{','.join(map(str, array.dims))}] ({place_of(run.instruction)})"
        if dims in weights and array.bytes >= MIB:
            findings.append((f"weights laid out anew in a loop, {where}", seconds))
        elif array.size > layer_entries:
            findings.append((f"a copy in a loop of more than a layer's cache, {where}", seconds))
    return merged(findings)


def cache_sizes(case: Case) -> list[tuple[int, ...]]:
    """Returns (layers, elements of one layer on a device) of every stack of keys and values of a sampler."""
    caches = cache_shapes(case.cfg, case.slots, case.width).values()
    shapes = [fields["k"][0] for fields in caches if "k" in fields]
    return [(shape[0], math.prod(shape[1:]) // case.sizes["tensor"]) for shape in shapes]


def weight_sizes(case: Case) -> set[tuple[int, ...]]:
    """Returns the sorted dimensions above 1 of every gathered matrix on a device: of a stack, and of one layer."""
    sizes = set()
    for leaf in jax.tree.leaves(case.stored, is_leaf=is_spec):
        dims = shard_shape(leaf, GATHERED, case.sizes)
        ordered = lambda numbers: tuple(sorted(n for n in numbers if n > 1))
        sizes |= {ordered(dims), ordered(dims[1:])} if leaf.axes[0] == "layers" else {ordered(dims)}
    return sizes


def synchronous_gathers(
    program: HloModule, runs: Iterable[ExecutionCount], case: Case, chip: Chip
) -> list[tuple[str, float]]:
    """Returns the all-gathers in loops that the program waits for, with their seconds."""
    findings = []
    for run in in_loops(runs, "all-gather"):
        size = received(run.instruction, case.devices)
        seconds = run.likely * (LATENCY + size / chip.ring_rate)
        findings.append((f"a gather that nothing overlaps, in a loop ({place_of(run.instruction)})", seconds))
    return merged(findings)


def float32_products(
    program: HloModule, runs: Iterable[ExecutionCount], case: Case, chip: Chip
) -> list[tuple[str, float]]:
    """Returns the matmuls of a bfloat16 run that have a float32 operand, with the seconds of their passes."""
    if case.cfg.dtype != "bfloat16":
        return []
    findings = []
    for run in runs:
        for product in cycles.products(program, run.instruction):
            if "f32" in product.dtypes:
                seconds = run.likely * product.flops * product.passes / chip.matrix_rate
                what = f"a product of {' and '.join(product.dtypes)} in a bfloat16 run, {product.passes} passes"
                findings.append((f"{what} ({short(product.op_name)})", seconds))
    return merged(findings)


def square_buffers(
    program: HloModule, runs: Iterable[ExecutionCount], case: Case, chip: Chip
) -> list[tuple[str, float]]:
    """Returns the arrays of [L, L], with L the length of a packed row or of a prompt, and the seconds to write and read
    them."""
    lengths = {case.shape.row_length, case.config.data.prompt_length} - {n for dims in weight_sizes(case) for n in dims}
    findings = []
    for run in runs:
        if run.instruction.op not in ("fusion", "copy", "broadcast", "convolution"):
            continue
        for array in run.instruction.shapes:
            if any(array.dims.count(length) > 1 for length in lengths) and array.bytes >= MIB:
                seconds = run.likely * 2 * array.bytes / chip.hbm_rate
                what = f"an array of {array.dtype}[{','.join(map(str, array.dims))}]"
                findings.append((f"{what} ({place_of(run.instruction)})", seconds))
    return merged(findings)


def in_loops(runs: Iterable[ExecutionCount], op: str) -> Iterable[ExecutionCount]:
    return (run for run in runs if run.instruction.op == op and run.loops and run.likely)


def merged(findings: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Returns the findings with equal sentences merged and their seconds added."""
    total: dict[str, float] = {}
    for what, seconds in findings:
        total[what] = total.get(what, 0.0) + seconds
    return list(total.items())


def place_of(instruction: Instruction) -> str:
    """Returns the place of an instruction in the traced program, or its name if the compiler added it."""
    return short(instruction.op_name) or instruction.name


def short(op_name: str) -> str:
    """Returns the last three parts of a place."""
    return "/".join(op_name.split("/")[-3:])
