"""The time of every plan's decode step and update by the TPU compiler's count, beside what the chip allows.

    python -m benchmarks.tpu --out tpu.json                   every row; needs libtpu; some 40 minutes on 2 cores
    python -m benchmarks.tpu --out tpu.json --rows 8b         those whose name holds a text

Nothing runs on a TPU: programs are compiled for a topology, and their cycles summed (docs/plan.md). Compiled programs
are kept as `jrl plan` keeps them, so that a second run is short; FILE.json is added to, a row at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jrl.tools.plan.libtpu import set_environment

# Four times as many rows at once as on v5p:4x4x4, one on each batch shard.
LONG_V6E = ("MeshShape.fsdp=64", "Online.prompts=64", "Learner.micro_batch_tokens=2228224")
# Half of a row on each device, and half as many rows at once.
SHARES = ("MeshShape.fsdp=4", "MeshShape.sequence=2", "Learner.micro_batch_tokens=69632")
# Experts stay on their devices, and tokens move.
EXPERTS = ("MeshShape.fsdp=2", "MeshShape.expert=8")
# name of a row: (configuration of configs/plan, topology, bindings)
ROWS = {
    "0.6b v5e": ("0.6b", "v5e:2x4", ()),
    "0.6b v6e": ("0.6b", "v6e:2x4", ()),
    "1.7b v5e": ("1.7b", "v5e:4x4", ()),
    "1.7b v6e": ("1.7b", "v6e:4x4", ()),
    "1.7b_lora v5e": ("1.7b_lora", "v5e:2x4", ()),
    "1.7b_lora v6e": ("1.7b_lora", "v6e:2x4", ()),
    "8b v5p": ("8b", "v5p:4x4x4", ()),
    "8b v6e": ("8b", "v6e:8x8", ()),
    "8b_two_slices v5p": ("8b_two_slices", "2xv5p:4x4x4", ()),
    "8b_two_slices v6e": ("8b_two_slices", "2xv6e:8x8", ()),
    "30b_moe v5p": ("30b_moe", "v5p:4x4x4", ()),
    "30b_moe v6e": ("30b_moe", "v6e:8x8", ()),
    "30b_moe, routes replayed v5p": ("30b_moe", "v5p:4x4x4", ("Learner.routes='replayed'",)),
    "30b_moe, expert axis v5p": ("30b_moe", "v5p:4x4x4", EXPERTS),
    "32b v5p": ("32b", "v5p:4x4x8", ()),
    "32b v6e": ("32b", "v6e:8x16", ()),
    "1.7b_long v5e": ("1.7b_long", "v5e:4x4", ()),
    "1.7b_long v6e": ("1.7b_long", "v6e:4x4", ()),
    "1.7b_long, rows in shares v5e": ("1.7b_long", "v5e:4x4", SHARES),
    "8b_long v5p": ("8b_long", "v5p:4x4x4", ()),
    "8b_long v6e": ("8b_long", "v6e:16x16", LONG_V6E),
}
PROGRAMS = ("rl.sample", "rl.update")


def measure(name: str) -> dict[str, Any]:
    """Returns a row: milliseconds of a decode step and of a micro-batch, the bounds from below, and the counts."""
    from jrl.resolve import load_config
    from jrl.tools.plan import compiled, counted, estimate, flops
    from jrl.tools.plan.case import for_tpus, make_case, programs_of
    from jrl.tools.plan.chips import parse_topology
    from jrl.tools.plan.shapes import lower

    source, where, bindings = ROWS[name]
    topology = parse_topology(where)
    config, parts = load_config(f"configs/plan/{source}.gin", bindings)
    config, choices = for_tpus(config, topology.num_devices)
    case = make_case(config, parts, topology.num_devices)
    lowered = lower(config, parts, compiled.topology_mesh(topology, config.mesh))
    traffic, row = estimate.of_programs(case), {"row": name, "chosen": {c.field: c.value for c in choices}}
    for program in PROGRAMS:
        report, _ = compiled.compile_one(lowered[program], topology)
        row[program] = {"gib": report.total / 2**30, "compile_seconds": report.compile_seconds}
        if report.text is None:
            row[program]["refused"] = "the compiler found no room"
            continue
        kind, own = programs_of(case)[program]
        kernels = counted.kernel_seconds(kind, own, topology.chip)
        memory = traffic[program].hbm / topology.chip.hbm_rate
        count = counted.hlo_cost(report.text, kind, own, topology.chip, kernels=kernels, memory=memory, times=1)
        least = estimate.estimate(flops.of_programs(case)[program], traffic[program], case, topology.chip)
        row[program] |= {**counted.to_json(count), "least_seconds": least.seconds}
        if kind == "sample":
            row[program] |= decode_step(count, case, topology.chip)
        else:
            row[program] |= micro_batch(count, case, topology.chip)
    return row


def decode_step(count: Any, case: Any, chip: Any) -> dict[str, float]:
    """Returns milliseconds of a decode step by the count and at least, and the share of the memory's bandwidth."""
    from jrl.tools.plan import counted

    step, least = count.decode_step, counted.read_bytes(case) / chip.hbm_rate
    return {"decode_step_ms": 1e3 * step, "decode_least_ms": 1e3 * least, "bandwidth": least / step}


def micro_batch(count: Any, case: Any, chip: Any) -> dict[str, float]:
    """Returns milliseconds of a micro-batch of an update, and the model's operations as a share of the peak, computed
    once: with links as the compiler schedules them, and with all of them hidden."""
    from jrl.tools.plan import flops

    kept = dataclasses.replace(case, cfg=dataclasses.replace(case.cfg, remat="none"))
    needed = flops.update(kept)
    at_peak = (needed.weights + needed.attention) / case.devices / chip.matrix_rate
    computed = count.compute + count.kernels
    return {
        "micro_batch_ms": 1e3 * count.seconds / case.micro_batches,
        "compute_ms": 1e3 * computed / case.micro_batches,
        "tokens_a_shard": case.tokens,
        "mfu": at_peak / count.seconds,
        "mfu_links_hidden": at_peak / max(computed, count.memory),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as a table in Markdown."""
    columns = ("row", "decode step, ms", "at least", "bandwidth", "a micro-batch, ms (compute)", "MFU (links hidden)",
               "float32 passes, sample and update", "GiB, sample and update")  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for row in rows:
        sample, update = (row[name] for name in PROGRAMS)
        if "refused" in sample or "refused" in update:
            lines.append(f"| {row['row']} | does not fit | | | | | | {sample['gib']:.1f}, {update['gib']:.1f} |")
            continue
        lines.append(
            f"| {row['row']} | {sample['decode_step_ms']:.2f} | {sample['decode_least_ms']:.2f} | "
            f"{sample['bandwidth']:.0%} | {update['micro_batch_ms']:.0f} ({update['compute_ms']:.0f}) | "
            f"{update['mfu']:.0%} ({update['mfu_links_hidden']:.0%}) | {sample['float32_share']:.1%}, "
            f"{update['float32_share']:.1%} | {sample['gib']:.1f}, {update['gib']:.1f} |"
        )
    return "\n".join(lines)


def step_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the seconds of a call that `jrl plan` builds a step from, which are the compiler's count with the stated
    models of links and kernels, beside the roofline's, as a table in Markdown."""
    columns = ("row", "sample, s", "roofline", "times it", "update, s", "roofline", "times it")
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for row in rows:
        parts = [row[name] for name in PROGRAMS if "refused" not in row[name]]
        if len(parts) == len(PROGRAMS):
            cells = (
                f"{p['seconds']:.3g} | {p['least_seconds']:.3g} | {p['seconds'] / p['least_seconds']:.2f}"
                for p in parts
            )
            lines.append(f"| {row['row']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON, added to a row at a time")
    parser.add_argument("--rows", default="", help="rows whose name holds this text")
    args = parser.parse_args(argv)
    chosen = [name for name in ROWS if args.rows in name]
    if not chosen:
        parser.error(f"--rows {args.rows!r} is in no name; there are: {', '.join(ROWS)}")
    set_environment()
    done = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    for i, name in enumerate(chosen):
        print(f"{i + 1} of {len(chosen)}: {name}", file=sys.stderr, flush=True)
        done[name] = measure(name)
        args.out.write_text(json.dumps(done, indent=1), encoding="utf-8")
    known = [done[name] for name in ROWS if name in done]
    print(f"{table(known)}\n\n{step_table(known)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
