"""Trains every recipe of configs/algos/ on their toy task: does it learn, on every seed, and how long does it take?

    python -m benchmarks.recipes --out F.json                     all, three seeds each
    python -m benchmarks.recipes --out F.json --only grpo ppo     these
    python -m benchmarks.recipes --out F.json --seeds 1

For each run: the mean reward of the first and of the last ten steps of the Online stage, and the interval of the
difference (95 %, Welch's, over the steps: rewards of steps are means over 256 completions each). A recipe has learned
where the interval excludes 0 on every seed. Runs of one process share what they compile; `warm` is the time of the
last run.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from statistics import fmean, variance

import jrl

ROOT = Path(__file__).parents[1]
WINDOW = 10  # steps
NOT_ALONE = ("toy", "staged_length")  # what others include, and runs that go on from one another
CRITICAL = 2.10  # two-sided 95 % point of Student's t with 2 * WINDOW - 2 degrees of freedom


def improvement(rewards: list[float]) -> tuple[float, float, float]:
    """Returns (first mean, last mean, half width of the interval of their difference)."""
    first, last = rewards[:WINDOW], rewards[-WINDOW:]
    width = CRITICAL * math.sqrt((variance(first) + variance(last)) / WINDOW)
    return fmean(first), fmean(last), width


def run(path: Path, seed: int, folder: Path) -> dict:
    """Trains one recipe and returns what came of it."""
    start = time.perf_counter()
    steps = list(jrl.steps(path.relative_to(ROOT).as_posix(), [f"Run.seed={seed}"], run=folder))
    rewards = [step.metrics["reward/mean"] for step in steps if step.phase == "rl"]
    first, last, width = improvement(rewards)
    return {
        "seed": seed, "seconds": time.perf_counter() - start, "first": first, "last": last, "half_width": width,
        "learned": last - first > width,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; recipes that are in it are not run again")
    parser.add_argument("--only", nargs="*", help="names of recipes")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    results = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    for path in sorted((ROOT / "configs" / "algos").glob("*.gin")):
        if (
            path.stem == "toy"
            or path.stem.startswith("staged_length")
            or path.stem in results
            or (args.only and path.stem not in args.only)
        ):
            continue
        with tempfile.TemporaryDirectory() as folder:
            runs = [run(path, seed, Path(folder) / str(seed)) for seed in range(args.seeds)]
        results[path.stem] = {"learned": all(one["learned"] for one in runs), "warm": runs[-1]["seconds"], "runs": runs}
        args.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
        shown = "  ".join(f"{one['first']:.2f} -> {one['last']:.2f} +- {one['half_width']:.2f}" for one in runs)
        print(f"{path.stem:<30} {'learned' if results[path.stem]['learned'] else 'NOT':<8} {shown}", flush=True)
    learned = sum(one["learned"] for one in results.values())
    print(f"{learned} of {len(results)} recipes learn on every seed")


if __name__ == "__main__":
    main()
