"""The budget's trial: memory by arithmetic against the TPU compiler's word, over configurations and chips.

    python -m benchmarks.budget --out budget.json               every case; needs libtpu; 15 minutes on 2 cores
    python -m benchmarks.budget --out FILE.json --only 8b       those whose name holds a text

Compared is all that is on a device while a program runs: its arguments and temporaries, and what the run keeps
beside them.
Results are kept as `jrl plan --search` keeps them, so that a second run is short. CASES were there while the
arithmetic was written; HELD_OUT were compiled afterwards, of shapes and choices that those do not have.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from jrl.tools.plan.libtpu import set_environment

V5P, V5E, V6E, V4 = "v5p:2x2x2", "v5e:4x4", "v6e:4x4", "v4:2x2x4"

# name: (configuration, topology, bindings)
CASES = {
    "0.6b v5e": ("0.6b", "v5e:2x4", ()),
    "0.6b v5e data": ("0.6b", "v5e:2x4", ("MeshShape.fsdp=4", "MeshShape.data=2")),
    "0.6b v6e": ("0.6b", "v6e:2x4", ("Decoder.remat='none'",)),
    "0.6b v6e tensor": ("0.6b", "v6e:2x4", ("MeshShape.fsdp=4", "MeshShape.tensor=2")),
    "0.6b v4 slots": ("0.6b", "v4:2x2x2", ("Sampler.slots=32",)),
    "0.6b v5p rows": ("0.6b", V5P, ("Learner.micro_batch_tokens=65536",)),
    "0.6b v5e reference": ("0.6b", "v5e:2x4", ("GRPO.kl=0.01",)),
    "1.7b v5e": ("1.7b", V5E, ()),
    "1.7b v5e blocks": ("1.7b", V5E, ("Decoder.attention_block=512",)),
    "1.7b v5e fsdp": ("1.7b", V5E, ("MeshShape.fsdp=16", "MeshShape.tensor=1")),
    "1.7b v6e": ("1.7b", V6E, ("MeshShape.fsdp=4", "MeshShape.tensor=4")),
    "1.7b v4": ("1.7b", V4, ("Learner.logprob_chunk=512",)),
    "1.7b v5p": ("1.7b", V5P, ("MeshShape.fsdp=2", "MeshShape.tensor=4")),
    "1.7b v5p reference": ("1.7b", V5P, ("MeshShape.fsdp=8", "MeshShape.tensor=1", "GRPO.kl=0.01")),
    "8b v5p": ("8b", "v5p:4x4x4", ()),
    "8b v5p fsdp": (
        "8b",
        "v5p:4x4x4",
        ("MeshShape.fsdp=64", "MeshShape.tensor=1", "Learner.micro_batch_tokens=131072"),
    ),
    "8b v5p blocks": ("8b", "v5p:4x4x4", ("Decoder.attention_block=512",)),
    "8b v6e": ("8b", "v6e:8x8", ()),
    "8b v4": ("8b", "v4:4x4x4", ("Sampler.slots=16",)),
    "32b v5p": ("32b", "v5p:4x4x8", ("Decoder.attention_block=512",)),
}
HELD_OUT = {
    "1.7b lora": ("1.7b_lora", "v5e:2x4", ()),
    "1.7b lora cut": ("1.7b_lora", "v5e:2x4", ("MeshShape.data=1", "MeshShape.fsdp=8")),
    "30b experts": ("30b_moe", "v5p:4x4x4", ()),
    "8b kept": ("8b", "v5p:4x4x4", ("Decoder.remat='none'", "Decoder.attention_block=512")),
    "8b apart": ("8b", "v6e:8x8", ("Sampler.layers='unrolled'", "Decoder.layers=12", "Sampler.slots=2")),
    "4b gemma": ("../gsm8k/gemma-3-4b", "v5e:4x4", ()),
    "0.6b float32": ("0.6b", "v5e:2x4", ("Decoder.dtype='float32'",)),
    "0.6b dots": ("0.6b", "v5e:2x4", ("Decoder.remat='dots'",)),
    "1.7b moments away": ("1.7b", V5E, ("AdamW.memory='host'",)),
    "8b dots": ("8b", "v5p:4x4x4", ("Decoder.remat='dots'",)),
    "8b both away": ("8b", "v5p:4x4x4", ("Decoder.remat='offload'", "AdamW.memory='host'")),
}
PROGRAMS = ("rl.sample", "rl.update")


def compare(name: str) -> list[dict]:
    """Returns a row for each program of a case: GiB by arithmetic, as compiled, and their ratio."""
    from jrl.device.chips import GIB
    from jrl.resolve import load_config
    from jrl.tools.plan import assigned, budget
    from jrl.tools.plan.case import make_case, split_name, with_known_shape
    from jrl.tools.plan.chips import parse_topology
    from jrl.tools.plan.planning import by_kind

    source, where, bindings = {**CASES, **HELD_OUT}[name]
    topology, path = parse_topology(where), f"configs/plan/{source}.gin"
    config, parts = load_config(path, bindings)
    case = make_case(with_known_shape(config)[0], parts, topology.num_devices)
    compiled = assigned.ask([path, *bindings], topology, PROGRAMS)
    counted, rows = budget.of_programs(case), []
    for program, memory in compiled.items():
        assigned_bytes = by_kind(program, memory, counted[program], budget.resident_memory(case)).total
        rows.append({
            "case": name, "program": split_name(program)[1], "ratio": counted[program].total / assigned_bytes,
            "arithmetic": counted[program].total / GIB, "compiled": assigned_bytes / GIB,
            "kinds": {kind: size / GIB for kind, size in counted[program]._asdict().items()}, "compiler": vars(memory),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="JSON file with every row")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    args = parser.parse_args()
    chosen = [name for name in {**CASES, **HELD_OUT} if args.only in name]
    if not chosen:
        parser.error(f"--only {args.only!r} is in no name; there are: {', '.join({**CASES, **HELD_OUT})}")
    set_environment()
    from jrl.tools.plan.compiled import libtpu_version

    if libtpu_version() is None:
        sys.exit("this trial compiles for TPUs: pip install libtpu")
    rows: list[dict] = []
    print(f"{'case':>20}  {'program':>8}  arithmetic  compiled  ratio", flush=True)
    for name in chosen:
        compared = compare(name)
        rows += compared
        for r in compared:
            numbers = f"{r['arithmetic']:10.2f}  {r['compiled']:8.2f}  {r['ratio']:5.2f}"
            print(f"{name:>20}  {r['program']:>8}  {numbers}", flush=True)
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    off = [abs(r["ratio"] - 1) for r in rows]
    print(f"{sum(x <= 0.1 for x in off)} of {len(off)} within 10 %, median {100 * statistics.median(off):.1f} %, "
          f"largest {100 * max(off):.1f} %")  # fmt: skip


if __name__ == "__main__":
    main()
