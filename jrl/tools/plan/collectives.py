"""Counts collectives and their bytes by mesh axis in the text of a compiled program.

This libtpu cannot print a compiled TPU program, so the same program is compiled for as many virtual CPU devices, in a
separate process: `python -m jrl.tools.plan.collectives OUT.json DEVICES STAGE CONFIG [NAME=VALUE ...]`. An empty STAGE
means all stages. The partitioner that places collectives is the same, but later merges and rewrites of the TPU compiler
are not seen.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jrl.tools.plan.cycles import Frequency, parse_instruction, scope_of

OPS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
         "u64": 8, "f64": 8}  # fmt: skip

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_COLLECTIVE = re.compile(rf" = (.+?) ({'|'.join(OPS)})(?:-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CALLS = re.compile(r"(?:to_apply|calls|body|condition)=%?([\w.\-]+)")
_NAMED_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)


class Collective(NamedTuple):
    """One kind of collective of a program, on one device."""

    op: str
    axes: str  # mesh axes it crosses, joined by +
    count: int  # number of executions
    bytes: int  # received over links, over all executions
    in_loop: bool  # inside a loop whose trip count depends on the data


def collectives(
    text: str, sizes: Sequence[tuple[str, int]], trips: int, frequency: Frequency | None = None
) -> list[Collective]:
    """Returns the collectives of a compiled program, merged by kind, axes and whether they are in a data-dependent
    loop, the most bytes first.

    Args:
      text: HLO after all passes.
      sizes: (mesh axis, devices) in the order of the mesh.
      frequency: trip counts of loops whose length is not known, and how often a condition is true, by scope.
      trips: trip count of such a loop in any other scope; inside another one it counts once.
    """
    totals: dict[tuple[str, str, bool], list[float]] = {}
    computations, entry = split(text)
    expected = frequency or Frequency()

    def visit(name: str, times: float, dynamic: bool) -> None:
        for line in computations.get(name, ()):
            match = _COLLECTIVE.search(line)
            if match:
                size, axes = received(line, match[1], match[2], sizes)
                if axes:
                    total = totals.setdefault((match[2], axes, dynamic), [0, 0])
                    total[0] += times
                    total[1] += times * size
            if " while(" in line:
                known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
                other_trips = 1 if dynamic else trips
                n = int(known[1]) if known else expected.trips.get(_scope_of(line), other_trips)
                for other in _CALLS.findall(line):
                    visit(other, times * n, dynamic or known is None)
            elif " conditional(" in line:
                branches = parse_instruction(line).branches
                taken = expected.taken.get(_scope_of(line)) if len(branches) == 2 else None
                for other, share in zip(branches, [1] * len(branches) if taken is None else [1 - taken, taken]):
                    visit(other, times * share, dynamic)
            else:
                for other in _CALLS.findall(line):
                    visit(other, times, dynamic)

    visit(entry, 1, False)
    rows = [Collective(op, axes, round(n), round(size), loop) for (op, axes, loop), (n, size) in totals.items()]
    return sorted(rows, key=lambda row: -row.bytes)


def _scope_of(line: str) -> str:
    """Returns the innermost scope around the loop or condition on a line; "" if it has none."""
    instruction = parse_instruction(line)
    return "" if instruction is None else scope_of(instruction)


def split(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns {name: lines} of the computations of an HLO module, and the name of its entry."""
    computations: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if (match := _COMPUTATION.match(line)) is not None:
            current = computations.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return computations, entry


def received(line: str, result: str, op: str, sizes: Sequence[tuple[str, int]]) -> tuple[int, str]:
    """Returns the bytes that one device receives in one execution of a collective on a ring, and the mesh axes."""
    arrays = [int(np.prod([int(n) for n in dims.split(",") if n])) * BYTES.get(dtype, 4)
              for dtype, dims in _ARRAY.findall(result)]  # fmt: skip
    if "-start(" in line and op in ("all-gather", "collective-permute"):  # (operands, results)
        arrays = arrays[len(arrays) // 2 :]
    size = sum(arrays)
    if op == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
        group = [int(n) for n in re.findall(r"\d+", pairs[1])][:2] if pairs else []
        return size, axes_of([group], sizes)
    groups = groups_of(line, int(np.prod([n for _, n in sizes])))
    n = len(groups[0])
    if op in ("all-reduce", "reduce-scatter") and "_promoted" in line:
        size //= 2  # it is in bfloat16 on TPUs; CPUs sum in float32
    axes = axes_of(groups, sizes)
    return int(size * ring_share(op, n)), axes


def ring_share(op: str, n: int) -> float:
    """Returns the bytes that each of n devices on a ring receives in a collective, for a byte of its result."""
    return {
        "all-gather": (n - 1) / n,
        "all-reduce": 2 * (n - 1) / n,
        "reduce-scatter": n - 1,
        "all-to-all": (n - 1) / n,
        "collective-permute": 1.0,
    }[op]


def groups_of(line: str, devices: int) -> list[list[int]]:
    """Returns the replica groups of a collective."""
    named = _NAMED_GROUPS.search(line)
    if named:
        shape = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", named[1])}
        ids = _iota(devices, named[2] or str(devices), named[3]).reshape(list(shape.values()))
        across = [list(shape).index(name) for name in re.findall(r"'(\w+)'", named[4])]
        ids = np.moveaxis(ids, across, range(-len(across), 0))
        return ids.reshape(-1, int(np.prod([ids.shape[i] for i in range(-len(across), 0)]))).tolist()
    listed = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line)
    if listed:
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        return _iota(devices, iota[2], iota[3]).reshape(_numbers(iota[1])).tolist()
    return [list(range(devices))]


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _iota(devices: int, shape: str, order: str | None) -> np.ndarray:
    """Returns the device ids 0, 1, ... as an array of `shape`, transposed by `order` if given."""
    ids = np.arange(devices).reshape(_numbers(shape))
    return ids.transpose(_numbers(order)) if order else ids


def axes_of(groups: list[list[int]], sizes: Sequence[tuple[str, int]]) -> str:
    """Returns the mesh axes along which the members of the first group differ, joined by +."""
    shape = [n for _, n in sizes]
    coordinates = np.array(np.unravel_index(np.array(groups[0], int), shape))
    return "+".join(name for (name, _), coordinate in zip(sizes, coordinates) if len(set(coordinate.tolist())) > 1)


def main(out: str, devices: int, stage: str | None, config: str, bindings: Sequence[str]) -> None:
    """Compiles every program of a run for virtual CPU devices and writes what its text shows: its collectives, the most
    positions of an array of logits, and for a sampler whether a loop carries a second cache."""
    from jrl.resolve import load_config
    from jrl.tools.plan import waste
    from jrl.tools.plan.case import (
        PlannedProgram,
        case_of,
        for_tpus,
        make_case,
        programs_of,
        shown_name,
        with_known_shape,
    )
    from jrl.tools.plan.frequency import frequency
    from jrl.tools.plan.shapes import lower, meshes_of

    resolved, parts = load_config(config, bindings)
    resolved, _ = for_tpus(with_known_shape(resolved)[0], devices)
    # TPU kernels do not compile on CPUs. They have no collectives: each device attends with its heads in its rows.
    resolved = dataclasses.replace(
        resolved,
        model=dataclasses.replace(resolved.model, attention="reference"),
        sampler=dataclasses.replace(resolved.sampler, attention="reference"),
    )
    case = make_case(resolved, parts, devices, stage)
    planned = programs_of(case)
    results = {}
    lowered = lower(resolved, parts, *meshes_of(resolved), stage)
    for name, program in lowered.items():
        kind, stage_case = planned.get(name, PlannedProgram("update", case_of(case, name)))
        text = program.compile().as_text()
        trips = stage_case.decode_steps if kind == "sample" else stage_case.micro_batches
        expected = frequency(kind, stage_case) if name in planned else Frequency()
        shares = {case.cfg.vocab_size, case.cfg.vocab_size // case.sizes["tensor"]}
        carried = waste.caches_carried(text, stage_case)
        results[name] = {
            "collectives": [row._asdict() for row in collectives(text, stage_case.network_sizes, trips, expected)],
            "logits": waste.widest_logits(text, shares),
            "second_cache": waste.second_cache(shown_name(case, name), stage_case, carried)
            if kind == "sample"
            else None,
        }
    Path(out).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] or None, sys.argv[4], sys.argv[5:])
