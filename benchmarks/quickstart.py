"""The quickstart's trial: five seeds, and a control whose rewards are permuted within each batch.

    python -m benchmarks.quickstart --out quickstart.json            five seeds and the control, about 20 minutes
    python -m benchmarks.quickstart --out FILE.json --seeds 0        one seed, no control

Prints a table of held-out accuracy before and after RL with 95 % intervals, by task, with time and memory. Run it on a
machine that does nothing else: the time is part of what is claimed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = "configs/quickstart.gin"

# The control learns from rewards that belong to other completions of the same batch. It is a part like any user's.
PERMUTED = '''
"""DAPO on rewards permuted within the batch: whatever this learns does not come from the verifier."""

import jax

from jrl.algos.dapo import DAPO, OBJECTIVE
from jrl.types import traced


@traced
class Permuted(DAPO):
    pass


def shape(config, groups):
    """Returns the batch's rewards in another order, which the lengths of its completions decide."""
    key = jax.random.fold_in(jax.random.key(0), (groups.action_mask.sum(axis=1) ** 2).sum())
    return jax.random.permutation(key, groups.reward)


ALGOS = {"Permuted": OBJECTIVE._replace(config=Permuted, shape=shape)}
'''


def train(folder: Path, bindings: list[str]) -> dict:
    """Runs the quickstart in a process of its own and returns its summary, with the wall time of the whole command."""
    command = [sys.executable, "-m", "jrl.cli", "train", CONFIG, *bindings, "--run", str(folder)]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    summary = json.loads((folder / "summary.json").read_text())
    return {**summary, "wall_seconds": time.monotonic() - start}


def line(name: str, summary: dict) -> str:
    before, after = summary["eval"]["before_rl"], summary["eval"]["after_rl"]
    columns = [
        f"{name:>9}",
        interval(before),
        interval(after),
        f"{100 * (after['mean'] - before['mean']):+6.1f}",
        f"{100 * before['parsed']:5.1f}",
        f"{summary['wall_seconds']:5.0f}",
        f"{summary['peak_bytes'] / 2**30:5.2f}",
    ]
    tasks = [
        f"{task} {100 * before['tasks'][task]['mean']:.0f} -> {100 * after['tasks'][task]['mean']:.0f}"
        + ("" if before["tasks"][task]["high"] < after["tasks"][task]["low"] else " (intervals overlap)")
        for task in before["tasks"]
    ]
    return "  ".join([*columns, ", ".join(tasks)])


def interval(result: dict) -> str:
    return f"{100 * result['mean']:5.1f} [{100 * result['low']:4.1f}, {100 * result['high']:4.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="JSON file with every summary")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    args = parser.parse_args()
    results = {}
    print(f"{'run':>9}  {'before RL':>18}  {'after RL':>18}  {'gain':>6}  parse  wall s  GiB  by task", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for seed in args.seeds:
            results[f"seed {seed}"] = train(Path(scratch) / f"seed{seed}", [f"Run.seed={seed}"])
            print(line(f"seed {seed}", results[f"seed {seed}"]), flush=True)
        if len(args.seeds) > 1:
            part = Path(scratch) / "permuted.py"
            part.write_text(PERMUTED)
            bindings = [f"parts=['{part}']", "Online.objective=@Permuted()", "Permuted.max_refills=1"]
            results["permuted"] = train(Path(scratch) / "permuted", bindings)
            print(line("permuted", results["permuted"]), flush=True)
    Path(args.out).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
