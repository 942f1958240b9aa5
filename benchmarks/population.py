"""A population against the same runs one after another: time of whole processes, and memory with adapters.

    python -m benchmarks.population --out F.json                    both
    python -m benchmarks.population --out F.json --what time --alone 4
    python -m benchmarks.population --out F.json --what lora
    python -m benchmarks.population --out F.json --what time --with Learner.row_length=24

`time`: 16 members of configs/tiny.gin (4 learning rates x 4 seeds) by `jrl sweep --population`, against `jrl train` of
each, whole processes, each measured with warm compilation caches after a run that fills them. With `--alone N` only N
of the 16 are trained alone, and their mean is counted 16 times; the JSON file says so. `--with` gives bindings to both
sides.

`lora`: 16 members with LoRA adapters over one published base of 20 million weights. Counts the arrays that a population
holds after a step, against the bytes of the base, and of 16 adapters with their moments; and what its programs
take beside them while they run: of each, arguments, results and temporary buffers as the compiler has laid them out.
Rows are few and short, so that what grows with the batch does not hide what grows with the members.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
JRL = (sys.executable, "-P", "-m", "jrl.cli")
RATES, SEEDS = ("1e-3", "2e-3", "3e-3", "5e-3"), range(4)
# About 20 million weights, most of them in matrices.
BASE = ("Decoder.layers=6", "Decoder.width=512", "Decoder.heads=8", "Decoder.kv_heads=8", "Decoder.head_dim=64",
        "Decoder.mlp_width=1536")  # fmt: skip
SMALL_STEPS = ("Online.prompts=2", "Online.samples=2", "Log.rollouts=False", "Sampler.slots=4",
               "Sampler.layers='scanned'", "Learner.row_length=12", "Learner.micro_batch_tokens=48",
               "Learner.logprob_chunk=12")  # fmt: skip


class Spent(NamedTuple):
    """What a process took from its start to its end."""

    seconds: float
    processor_seconds: float  # of it and its children


def process(*arguments: str, folder: Path) -> Spent:
    """Returns what one `jrl` process took."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*JRL, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"jrl {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Spent(time.perf_counter() - start, after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime)


def measure_time(alone: int, repeats: int, bindings: Sequence[str]) -> dict:
    """Returns the seconds of both, and their ratio."""
    tiny = str(ROOT / "configs" / "tiny.gin")
    runs = [(rate, seed) for rate in RATES for seed in SEEDS]
    chosen = runs[:: len(runs) // alone][:alone]
    rates, seeds = f"AdamW.learning_rate=[{','.join(RATES)}]", f"Run.seed=[{SEEDS[0]}..{SEEDS[-1]}]"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = lambda rate, seed, to: process(
            "train", tiny, *bindings, f"AdamW.learning_rate={rate}", f"Run.seed={seed}", "--run", to, folder=folder
        )
        together = lambda to: process(
            "sweep", tiny, *bindings, rates, seeds, "--out", to, "--population", folder=folder
        )
        first = {"alone": one(*runs[0], "cold").seconds, "together": together("cold-population").seconds}
        trained = [one(rate, seed, f"alone-{i}") for i, (rate, seed) in enumerate(chosen)]
        populations = [together(f"together-{i}") for i in range(repeats)]
    counted, of_processors = (len(runs) * statistics.mean(column) for column in zip(*trained))
    seconds, processor_seconds = (list(column) for column in zip(*populations))
    return {
        "bindings": list(bindings), "members": len(runs), "trained_alone": len(chosen),
        "alone_seconds": [one.seconds for one in trained],
        "one_after_another_seconds": counted, "population_seconds": seconds,
        "ratio": counted / statistics.median(seconds), "first_seconds": first,
        "processor_seconds": {"one_after_another": of_processors, "population": processor_seconds},
        "processor_ratio": of_processors / statistics.median(processor_seconds),
    }  # fmt: skip


def measure_memory() -> dict:
    """Returns bytes held by a population with adapters, and taken by its programs, and what the bar allows."""
    import jax

    from jrl.run import population as populations
    from jrl.run.report.display import open_display
    from jrl.tools.sweep import population as sweep_population
    from jrl.tools.sweep.members import read_sweep

    tiny = str(ROOT / "configs" / "tiny.gin")
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        folder = Path(name)
        process("train", tiny, *BASE, *SMALL_STEPS, "Online.steps=1", "--run", "base-run", folder=folder)
        process("export", "base-run", "--to", "base", folder=folder)
        bindings = ["Config.model=@Published()", "Published.path='base'", "Config.adapter=@LoRA()", "LoRA.rank=8",
                    *SMALL_STEPS, "Online.steps=1", f"AdamW.learning_rate=[{','.join(RATES)}]",
                    f"Run.seed=[{SEEDS[0]}..{SEEDS[-1]}]"]  # fmt: skip
        sweep = read_sweep(tiny, bindings)
        configs, parts = sweep_population.read_configs(sweep)
        sweep_population.check_population(configs, parts.tables)
        stop = threading.Event()
        show = lambda member: lambda ends: open_display(ends, open(os.devnull, "w"), live=False)
        held: list[int] = []
        with populations.open_population(configs, parts, folder / "sweep", stop, show) as population:
            sweep_population.run(population, stop, lambda: held.append(sum(x.nbytes for x in jax.live_arrays())))
            shape = population.members.shapes(state_of(population))
            programs = {name: taken(program) for name, program in population.first.program_cache.programs.items()}
            peak_process = population.first.memory.peak
        policy = shape.models["policy"]
        base, adapters, moments = size_of(policy.frozen), size_of(policy.params), size_of(policy.opt_state)
    allowed = base + adapters + moments
    return {
        "base_bytes": base, "adapter_bytes": adapters, "moment_bytes": moments, "held_bytes": max(held),
        "over_base_adapters_and_moments": max(held) / allowed - 1,
        "bytes_of_programs": {name: found for name, found in programs.items() if found},
        "peak_bytes": max(programs.values()), "peak_over": max(programs.values()) / allowed - 1,
        "process_tree_peak_bytes": peak_process,
    }  # fmt: skip


def taken(program) -> int:
    """Returns the most bytes that a program takes while it runs, arguments included; 0: it was not compiled."""
    found = [executable.memory_analysis() for executable in program._compiled.values()]
    sizes = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    return max((sum(getattr(m, size) for size in sizes) - m.alias_size_in_bytes for m in found), default=0)


def state_of(population):
    """Returns the state of one member in its stage, as shapes."""
    from jrl.run.precompile import state_shape
    from jrl.run.records import inputs_of

    return state_shape(inputs_of(population.first), 1)


def size_of(tree) -> int:
    """Returns the bytes of shapes."""
    import jax

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; what is in it and not measured stays")
    parser.add_argument("--what", choices=("time", "lora"), nargs="+", default=("time", "lora"))
    parser.add_argument("--with", dest="bindings", nargs="*", default=(), help="bindings of both sides of `time`")
    parser.add_argument("--alone", type=int, default=16, choices=(1, 2, 4, 8, 16), help="members trained alone")
    parser.add_argument("--repeats", type=int, default=3, help="populations")
    args = parser.parse_args()
    results = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    if "time" in args.what:
        results["time"] = measure_time(args.alone, args.repeats, args.bindings)
    if "lora" in args.what:
        results["lora"] = measure_memory()
    args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
