"""What replayed routes change: sampler against learner of a small mixture of experts, with and without.

    python -m benchmarks.routes [--dtype bfloat16] [--steps 6]

Two runs of the same seed, with Learner.routes 'computed' and 'replayed', of random weights that learn an addition. Both
draw the same first batch. Prints one row a metric: the mean over steps, of `mismatch/probability` the largest.
Hardware: any CPU. Time: two minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import tempfile

import numpy as np

import jrl

MIXTURE = [
    "Decoder.layers=8", "Decoder.width=128", "Decoder.heads=4", "Decoder.kv_heads=2", "Decoder.head_dim=32",
    "Decoder.experts=@Experts()", "Experts.count=32", "Experts.per_token=4", "Experts.width=32",
    "Online.prompts=16", "Online.samples=4", "Sampler.completion_length=32", "AdamW.learning_rate=3e-4",
    "Sampler.layers='scanned'", "Log.samples=0", "Log.rollouts=False", "Checkpoint.every=1000",
]  # fmt: skip
METRICS = ("policy/sampler_difference", "mismatch/probability", "mismatch/k1", "mismatch/k3", "mismatch/chi2",
           "router/mismatch", "reward/mean")  # fmt: skip
LARGEST = "mismatch/probability"


def measured(folder: pathlib.Path, routes: str, dtype: str, steps: int) -> dict[str, list[float]]:
    """Returns each metric at every step of a run."""
    own = [f"Learner.routes={routes!r}", f"Decoder.dtype={dtype!r}", f"Online.steps={steps}"]
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    with contextlib.closing(jrl.steps("configs/tiny.gin", [*MIXTURE, *own], run=folder / routes)) as run:
        rows = [step.metrics for step in run]
    for name in METRICS:
        found[name] = [float(row[name]) for row in rows if name in row]
    return found


def table(columns: dict[str, dict[str, list[float]]], steps: slice) -> str:
    """Returns a line for each metric, with a column for each run."""
    lines = [f"{'':30}" + "".join(f"{name:>14}" for name in columns)]
    for name in METRICS:
        summary = max if name == LARGEST else np.mean
        values = [run[name][steps] for run in columns.values()]
        lines.append(f"{name:30}" + "".join(f"{summary(v):14.3g}" if v else f"{'-':>14}" for v in values))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--steps", type=int, default=6)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: measured(pathlib.Path(folder), name, asked.dtype, asked.steps)
                for name in ("computed", "replayed")}  # fmt: skip
    print(f"\n{asked.dtype}, first step: the same tokens\n{table(runs, slice(1))}")
    print(f"\n{asked.dtype}, {asked.steps} steps\n{table(runs, slice(None))}")


if __name__ == "__main__":
    main()
