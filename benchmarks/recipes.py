"""Trains every recipe of configs/algos/ on their toy task: does it learn on every seed, how long does it take, and does
it learn nothing where rewards say nothing?

    python -m benchmarks.recipes --out F.json                     all, three seeds each, and a control
    python -m benchmarks.recipes --out F.json --only grpo ppo     these
    python -m benchmarks.recipes --out F.json --seeds 1           one seed each
    python -m benchmarks.recipes --out F.json --minutes 4         no new run after 4 minutes; the same call goes on

For each run: the mean outcome (right or wrong, whatever else is rewarded) in the first and in the last five sampling
calls, of the prompts sampled in both, each prompt alike, and the interval of the difference (95 %, paired by prompt).
So it does not matter which prompts a recipe samples more often, or leaves out of its loss. A recipe has learned where
the interval lies above 0 on every seed.

The control is the same run with permuted rewards: at every step, what the completions of the batch were scored with is
dealt out anew among them, so that the batch's statistics stay and no reward says anything of its completion.

A recipe without an Online stage learns from stored rows. Of it, in the first and in the last five steps of its last
stage: the share of pairs in the right order; of labeled answers, by how much the good ones gained more than the bad
ones; else the log-prob of what is imitated. The interval is Welch's, over steps. Its control deals the labels of every
comparison out anew.

Seconds are those of a whole run, from opening its folder to its summary, and of the processors as well: of this process
and of its verifiers. `warm`: the same programs had been compiled in this process before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev, variance
from unittest import mock

import numpy as np

import jrl
from jrl.rollout import collect
from jrl.rollout.collect import Collected, PromptSampler
from jrl.run import offline, online
from jrl.run.report.metrics import read_metrics
from jrl.tasks.data.stored import StoredRows, padded_rows
from jrl.tasks.verdict import Status

ROOT = Path(__file__).parents[1]
WINDOW = 5  # sampling calls
CRITICAL = (
    1.98  # two-sided 95 % point of Student's t with about 100 degrees of freedom, one less than the toy's prompts
)
WELCH = 2.31  # two-sided 95 % point of Student's t with 8 degrees of freedom, two windows of five steps
WARM_STEPS = 40  # of imitation, before the stage on stored rows
FEWEST = 10  # prompts in both; with fewer, the interval is of their completions, Welch's

Outcomes = dict[str, list[float]]  # prompt -> outcomes of its completions, in one sampling call


def recipes() -> dict[str, Path]:
    """Returns the recipes by name: every file beside toy.gin, which the others include."""
    return {path.stem: path for path in sorted((ROOT / "configs" / "algos").glob("*.gin")) if path.stem != "toy"}


def pooled(calls: list[Outcomes]) -> Outcomes:
    """Returns the outcomes of several sampling calls together."""
    together: Outcomes = {}
    for call in calls:
        for prompt, rewards in call.items():
            together.setdefault(prompt, []).extend(rewards)
    return together


def improvement(calls: list[Outcomes]) -> tuple[float, float, float]:
    """Returns (first mean, last mean, half width of the interval of their difference)."""
    first, last = pooled(calls[:WINDOW]), pooled(calls[-WINDOW:])
    both = sorted(first.keys() & last.keys())
    if len(both) < FEWEST:
        early, late = ([reward for prompt in both for reward in found[prompt]] for found in (first, last))
        return (
            fmean(early),
            fmean(late),
            CRITICAL * math.sqrt(variance(early) / len(early) + variance(late) / len(late)),
        )
    early, late = ([fmean(found[prompt]) for prompt in both] for found in (first, last))
    differences = [b - a for a, b in zip(early, late)]
    return fmean(early), fmean(late), CRITICAL * stdev(differences) / math.sqrt(len(both))


def outcomes_of(batch: Collected) -> Outcomes:
    """Returns the outcomes of a scored batch that count, by prompt."""
    found: Outcomes = {}
    for row, (outcome, valid) in enumerate(zip(batch.host_scores.outcome, batch.host_scores.valid)):
        if valid:  # padding is not
            prompt = batch.visits[row // batch.samples].example.messages[-1].content
            found.setdefault(prompt, []).append(float(outcome))
    return found


def permuted(batch: Collected, sampler: PromptSampler, draws: np.random.Generator) -> Collected:
    """Returns a scored batch whose scores are dealt out anew among its completions; padding stays where it is."""
    scores = batch.host_scores
    rows = np.flatnonzero(scores.verdict != Status.PADDING)
    order = np.arange(len(scores.verdict))
    order[rows] = draws.permutation(rows)
    dealt = collect.chosen_scores([scores], [(0, int(row)) for row in order])
    return batch._replace(scores=collect.on_device(dealt, sampler.components, sampler.mesh), host_scores=dealt)


def relabeled(rows: StoredRows, draws: np.random.Generator) -> StoredRows:
    """Returns stored rows with the labels of every comparison dealt out anew among its weighed rows."""
    label = rows.label.copy()
    for unit in np.unique(rows.unit[rows.weight > 0]):
        members = np.flatnonzero((rows.unit == unit) & (rows.weight > 0))
        # One answer alone has nobody to change labels with: it is good or bad by a coin.
        label[members] = draws.permutation(label[members]) if len(members) > 1 else draws.integers(2)
    return rows._replace(label=label)


def stored_improvement(rows: list[dict]) -> tuple[float, float, float]:
    """Returns (first mean, last mean, half width of the interval of their difference) of a stage on stored rows."""
    values = [stored_measure(row) for row in rows]
    first, last = values[:WINDOW], values[-WINDOW:]
    width = WELCH * math.sqrt((variance(first) + variance(last)) / WINDOW)
    return fmean(first), fmean(last), width


def stored_measure(row: dict) -> float:
    if "kto/good" in row:
        return row["kto/good"] - row["kto/bad"]
    return next(row[name] for name in ("pairs/accuracy", "dpo/accuracy", "policy/logprob") if name in row)


@contextlib.contextmanager
def observed(calls: list[Outcomes], control: int | None) -> Iterator[None]:
    """Within it, the outcomes of every sampling call of this process are appended to `calls`.

    Args:
      control: the seed by which rewards are permuted afterwards, for the run; None: they are not.
    """
    draws, collects = np.random.default_rng(control), collect.collect

    def observe(submitted, samples, scorer, sources, sampler, *rest):
        batch = collects(submitted, samples, scorer, sources, sampler, *rest)
        calls.append(outcomes_of(batch))
        return batch if control is None else permuted(batch, sampler, draws)

    pad = offline.padded_rows if control is None else lambda rows, count: padded_rows(relabeled(rows, draws), count)
    with mock.patch.object(online, "collect", observe), mock.patch.object(offline, "padded_rows", pad):
        yield


def processor_seconds() -> float:
    """Returns what this process and its ended children have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def run(path: Path, seed: int, *, control: bool, warm: bool) -> dict:
    """Trains one recipe and returns what came of it."""
    start, used = time.perf_counter(), processor_seconds()
    calls: list[Outcomes] = []
    with tempfile.TemporaryDirectory() as folder, observed(calls, seed if control else None):
        jrl.train(path.relative_to(ROOT).as_posix(), [f"Run.seed={seed}"], run=Path(folder) / "run")
        rows = list(read_metrics(Path(folder) / "run" / "metrics.jsonl"))
    first, last, width = improvement(calls) if calls else stored_improvement(rows[WARM_STEPS:])
    return {
        "seed": seed, "warm": warm, "seconds": round(time.perf_counter() - start, 1),
        "processor_seconds": round(processor_seconds() - used, 1),
        "first": round(first, 4), "last": round(last, 4), "half_width": round(width, 4),
    }  # fmt: skip


def shown(runs: list[dict]) -> str:
    return "  ".join(f"{one['first']:.2f} -> {one['last']:.2f} +- {one['half_width']:.2f}" for one in runs)


def learned(one: dict) -> bool:
    """Whether a run's interval lies above 0."""
    return one["last"] - one["first"] > one["half_width"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; runs that are in it are not made again")
    parser.add_argument("--only", nargs="*", help="names of recipes")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each recipe")
    parser.add_argument("--controls", type=int, default=1, help="runs of each recipe with permuted rewards")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no further run begins")
    args = parser.parse_args()
    start = time.monotonic()
    results = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    for name, path in recipes().items():
        if args.only and name not in args.only:
            continue
        entry = results.setdefault(name, {"runs": [], "controls": []})
        warm = False
        for kind, count in (("runs", args.seeds), ("controls", args.controls)):
            for seed in range(len(entry[kind]), count):
                if time.monotonic() - start > 60 * args.minutes:
                    return
                entry[kind].append(run(path, seed, control=kind == "controls", warm=warm))
                warm = True
                args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        found = "learned" if all(map(learned, entry["runs"])) else "NOT"
        print(f"{name:<30} {found:<8} {shown(entry['runs'])}  | permuted {shown(entry['controls'])}", flush=True)
    made = [entry for entry in results.values() if entry["runs"]]
    print(f"{sum(all(map(learned, entry['runs'])) for entry in made)} of {len(made)} recipes learn on every seed")


if __name__ == "__main__":
    main()
