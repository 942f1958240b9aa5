"""Claims of the literature in miniature, on the toy task of configs/algos/toy.gin: what comes of them here?

    python -m benchmarks.experiments --out DIR                      all of them, three seeds for each variant
    python -m benchmarks.experiments --out DIR --only staleness     one of them
    python -m benchmarks.experiments --out DIR --seeds 5            more seeds
    python -m benchmarks.experiments --out DIR --minutes 4          no new variant after 4 minutes; call again to go on

A row of EXPERIMENTS is a configuration, the bindings of its variants, and the metrics that are compared. Every variant
is one `jrl sweep` over seeds, in a folder of DIR that experiments share; seeds train in one program where that is
possible. Variants are compared as `jrl compare` compares runs. Once all variants of an experiment are trained, its
results (NAME.json), its plots and the part of its page (NAME.md) below the mark are written in docs/experiments/. What
stands above the mark is written by hand: what the paper claims, and what came of it.

Metrics that begin with "all/" are of the trained policy on all prompts of the task, 16 samples of each, as `jrl eval`
draws and scores them; those that begin with "right answers preferred/" of its reward (benchmarks/shifted_pairs.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.special import stdtrit

from benchmarks import shifted_pairs
from jrl import cli, exit_codes
from jrl.ops.divergence import DIVERGENCES
from jrl.run.trained import open_trained
from jrl.tools.evaluation import held_out_visits, reevaluate
from jrl.tools.sweep import charts, manifest
from jrl.tools.sweep.comparison import Comparison, Curve, VariantResult, compare, to_json
from jrl.tools.sweep.runs import RunResult, find_runs, read_run

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "experiments"
MARK = "<!-- Below: written by python -m benchmarks.experiments. -->"
ALL_PROMPTS = "all/"  # before the name of a metric of the evaluation on all prompts
EVALUATION = ("Config.eval=@Eval()", "Data.held_out_every=1", "Eval.prompts=100", "Eval.samples=16")
EVALUATED = "all_prompts.json"  # in a run's folder
PREFERRED = "right answers preferred/"  # before the name of a shift of benchmarks/shifted_pairs.py
PAIRS = "shifted_pairs.json"  # in a run's folder


class Variant(NamedTuple):
    label: str
    bindings: tuple[str, ...] = ()
    x: float | None = None  # place on the axis of the plot; variants of one label are one line


class Experiment(NamedTuple):
    title: str
    config: str  # a file of configs/algos
    variants: tuple[Variant, ...]
    metrics: tuple[str, ...]
    bindings: tuple[str, ...] = ()  # of every variant
    baseline: str | None = None  # name of a variant; with an axis, the first of a label is that of the others
    axis: str | None = None  # what Variant.x is
    population: bool = True  # seeds train in one program


def name_of(variant: Variant, axis: str | None) -> str:
    return variant.label if axis is None else f"{variant.label}, {axis} {variant.x:g}"


SEVERAL_UPDATES = ("Learner.minibatches=2", "AdamW.learning_rate=5e-4", "warm/Learner.minibatches=1")
CORRECTIONS = {
    "truncated weights": ("Online.objective=@GRPO()", "GRPO.importance=@TruncatedImportance()"),
    "decoupled PPO": ("Online.objective=@DecoupledPPO()",),
    "M2PO": ("Online.objective=@M2PO()",),
}
BEFORE = Variant("before RL", ("Config.stages=[@warm/Offline()]",))
OFFLINE = 40  # steps, and a lag at which all of them learn from samples of the policy at the start
EXPLICIT = ("pairs/Offline.objective=@BradleyTerry()", "pairs/Offline.trains='reward'")
LINKS = {
    "reverse KL": ("FDPO.alpha=1.0",),
    "alpha 0.5": ("FDPO.alpha=0.5",),
    "forward KL": ("FDPO.alpha=0.0",),
    "Jensen-Shannon": ("FDPO.divergence='jensen_shannon'",),
}
EXPERIMENTS: Mapping[str, Experiment] = {
    "staleness": Experiment(
        "Staleness against what is learned, for three corrections",
        "toy",
        tuple(
            Variant(label, (*bindings, f"Online.lag={lag}"), lag)
            for label, bindings in CORRECTIONS.items()
            for lag in (0, 1, 2, 4, 8)
        ),
        ("all/accuracy", "reward/mean"),
        SEVERAL_UPDATES,
        axis="lag",
    ),
    "lite-ppo": Experiment(
        "Lite-PPO against GRPO and DAPO",
        "toy",
        (
            Variant("GRPO", ("Online.objective=@GRPO()",)),
            Variant("DAPO", ("Online.objective=@DAPO()",)),
            Variant("Lite-PPO", ("Online.objective=@LitePPO()",)),
        ),
        ("all/accuracy", "reward/mean"),
        baseline="GRPO",
    ),
    "clip-higher": Experiment(
        "Clip-higher and entropy",
        "grpo",
        tuple(Variant(f"clip_high {high}", (f"GRPO.clip_high={high}",)) for high in (0.2, 0.28, 0.5)),
        ("policy/entropy", "all/accuracy"),
        (
            *("Learner.minibatches=4", "Learner.epochs=2", "AdamW.learning_rate=5e-4"),
            *("warm/Learner.minibatches=1", "warm/Learner.epochs=1"),
        ),
        "clip_high 0.2",
    ),
    "length": Experiment(
        "Dr. GRPO and the length of answers",
        "toy",
        (
            Variant("GRPO", ("Online.objective=@GRPO()",)),
            Variant("Dr. GRPO", ("Online.objective=@DrGRPO()",)),
        ),
        ("rollout/completion_length", "all/accuracy"),
        ("Sampler.completion_length=16", "warm/Offline.steps=12", "Online.steps=60"),
        "GRPO",
    ),
    "ensemble": Experiment(
        "One reward model against an ensemble",
        "reward_ensemble",
        (
            Variant("one model", ("Online.rewards={'first': 1.0}", "Online.ensemble=None")),
            Variant("worst of three", ("Online.ensemble=@WorstCase()",)),
        ),
        ("reward/outcome", "reward/mean"),
        ("GRPO.kl=None", "Online.steps=40"),
        "one model",
        population=False,
    ),
    "one-example": Experiment(
        "One training example",
        "toy",
        (
            BEFORE,
            Variant("all examples", ("Online.objective=@GRPO()",)),
            Variant(
                "one example",
                (
                    "Online.objective=@GRPO()",
                    "Online.curriculum=@MostVaried()",
                    "MostVaried.count=1",
                    "MostVaried.pilot=1",
                ),
            ),
        ),
        ("all/accuracy",),
        baseline="before RL",
    ),
    "pass-at-k": Experiment(
        "Low-likelihood focus and pass@k",
        "toy",
        (
            BEFORE,
            Variant("GRPO", ("Online.objective=@GRPO()",)),
            Variant("SELF", ("Online.objective=@SELF()", "SELF.max_refills=2")),
        ),
        ("all/accuracy", "all/pass@8"),
        baseline="GRPO",
    ),
    "online-dpo": Experiment(
        "On-line against offline DPO under growing staleness",
        "online_dpo",
        tuple(Variant("DPO", (f"Online.steps={OFFLINE}", f"Online.lag={lag}"), lag) for lag in (0, 1, 4, 8, OFFLINE)),
        ("all/accuracy", "all/pass@8"),
        ("AdamW.learning_rate=5e-4",),
        axis="lag",
    ),
    "implicit-reward": Experiment(
        "DPO's implicit reward against an explicit one under shift",
        "dpo",
        (Variant("explicit: Bradley-Terry", EXPLICIT), Variant("implicit: DPO")),
        tuple(f"{PREFERRED}{shift}" for shift in shifted_pairs.SHIFTS),
        (
            *("pairs/Offline.task=@few/Addition()", f"few/Addition.largest={shifted_pairs.SEEN}"),
            "pairs/Offline.steps=60",
        ),
        "explicit: Bradley-Terry",
    ),
    "f-divergences": Experiment(
        "The divergence of f-DPO and the diversity of answers",
        "f_dpo",
        (
            BEFORE._replace(label="before DPO"),
            *(Variant(label, bindings) for label, bindings in LINKS.items()),
        ),
        ("all/accuracy", "all/distinct answers"),
        baseline="reverse KL",
    ),
    "distillation": Experiment(
        "Three divergences of distillation",
        "distillation",
        (
            Variant("the teacher", ("Config.stages=[@warm/Offline()]", "warm/Offline.trains='policy'")),
            *(Variant(divergence, (f"Distillation.divergence='{divergence}'",)) for divergence in DIVERGENCES),
        ),
        ("all/accuracy", "all/distinct answers"),
        baseline="forward",
    ),
}


def sweep_of(experiment: Experiment, variant: Variant, seeds: int) -> list[str]:
    """Returns the configuration and the bindings of the sweep over a variant's seeds."""
    bindings = (*experiment.bindings, *variant.bindings, f"Run.seed=[0..{seeds - 1}]")
    return [f"configs/algos/{experiment.config}.gin", *bindings]


def folder_of(out: Path, experiment: Experiment, variant: Variant, seeds: int) -> Path:
    """Returns the folder of a sweep: equal sweeps of several experiments share it."""
    sweep = sweep_of(experiment, variant, seeds)
    words = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join([experiment.config, *variant.bindings])).strip("-")
    return out / f"{words[:60]}-{hashlib.sha256(repr(sweep).encode()).hexdigest()[:8]}"


def is_finished(folder: Path) -> bool:
    """Whether all members of a sweep are trained."""
    file = folder / manifest.FILE
    return file.exists() and all(member.get("finished") for member in manifest.read(folder)["members"])


def train(experiment: Experiment, variant: Variant, seeds: int, folder: Path) -> None:
    """Trains and evaluates what is not there yet. Raises RuntimeError where a sweep does not finish."""
    how = ["--population"] if experiment.population else []
    # A finished sweep is not asked again: after an upgrade it would be refused as that of another configuration.
    code = (
        exit_codes.DONE
        if is_finished(folder)
        else cli.main(["sweep", *sweep_of(experiment, variant, seeds), "--out", str(folder), *how])
    )
    if code != exit_codes.DONE:
        raise RuntimeError(f"the sweep in {folder} ended with {code}; the same command goes on")
    measures = lambda prefix: any(metric.startswith(prefix) for metric in experiment.metrics)
    first = None
    for run in find_runs([folder])[0]:
        if measures(PREFERRED) and not (run / PAIRS).exists():
            found = shifted_pairs.accuracies(run, explicit=set(EXPLICIT) <= set(variant.bindings))
            (run / PAIRS).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if measures(ALL_PROMPTS) and not (run / EVALUATED).exists():
            trained = open_trained(run, EVALUATION)
            first = first or trained.policy  # its programs are compiled once
            trained = dataclasses.replace(trained, policy=first)
            result = reevaluate(trained, held_out_visits(trained), lambda done, total: None)
            (run / EVALUATED).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def evaluated(folder: Path) -> dict[str, float]:
    """Returns the metrics of a run on all prompts, and on shifted pairs."""
    read = lambda name: json.loads((folder / name).read_text(encoding="utf-8")) if (folder / name).exists() else {}
    result, metrics = read(EVALUATED), {f"{PREFERRED}{shift}": value for shift, value in read(PAIRS).items()}
    if not result:
        return metrics
    metrics |= {f"{ALL_PROMPTS}pass@{k}": value["mean"] for k, value in result.get("pass_at_k", {}).items()}
    if "distinct" in result:
        metrics[f"{ALL_PROMPTS}distinct answers"] = result["distinct"]["mean"]
    return {f"{ALL_PROMPTS}accuracy": result["mean"], **metrics}


def compared(experiment: Experiment, runs: Mapping[Variant, Sequence[RunResult]]) -> Comparison:
    """Returns the comparison of an experiment's variants, whose labels are their names."""
    label = lambda name: f"variant='{name}'"
    named = [
        run._replace(settings={"variant": f"'{name_of(variant, experiment.axis)}'"})
        for variant, found in runs.items()
        for run in found
    ]
    baseline = None if experiment.baseline is None else label(experiment.baseline)
    found = compare(named, experiment.metrics, by=("variant",), baseline=baseline)
    plain = lambda row: row._replace(variant=row.variant._replace(label=row.variant.settings["variant"].strip("'")))
    rows = {metric: tuple(map(plain, lines)) for metric, lines in found.metrics.items()}
    return found._replace(metrics=rows, baseline=experiment.baseline)


def over_axis(rows: Sequence[VariantResult], variants: Sequence[Variant]) -> list[VariantResult]:
    """Returns a row for every label whose curve is the value of its variants, each at its place on the axis."""
    lines = []
    for label in dict.fromkeys(variant.label for variant in variants):
        points = [(variant.x, row) for variant, row in zip(variants, rows) if variant.label == label]
        values = [[row.value.mean, row.value.low, row.value.high] for _, row in points]
        curve = Curve(np.array([x for x, _ in points], np.float64), *np.array(values, np.float64).T)
        lines.append(points[0][1]._replace(variant=points[0][1].variant._replace(label=label), curve=curve))
    return lines


def plot(metric: str, rows: Sequence[VariantResult], experiment: Experiment) -> str:
    """Returns the plot of a metric as SVG: over the axis of the experiment, over the steps, or a dot for each run."""
    if experiment.axis is not None:
        return charts.curves(metric, over_axis(rows, experiment.variants), over=experiment.axis)
    return charts.curves(metric, rows) if any(len(row.curve.steps) for row in rows) else charts.intervals(metric, rows)


def plot_file(name: str, metric: str) -> str:
    return f"{name}-{re.sub(r'[^a-z0-9]+', '-', metric.lower())}.svg"


def generated(name: str, experiment: Experiment, result: Mapping[str, Any]) -> str:
    """Returns the part of an experiment's page that is made from its results.

    Args:
      result: the content of NAME.json.
    """
    lines = [f"    python -m benchmarks.experiments --out runs/experiments --only {name} --seeds {result['seeds']}", ""]
    common = f", all with `{' '.join(experiment.bindings)}`" if experiment.bindings else ""
    lines += [
        f"Task: `configs/algos/{experiment.config}.gin`{common}. Seeds 0 to {result['seeds'] - 1}. "
        f"{result['hardware']}, {result['versions']}.",
        "",
        "| variant | bindings |",
        "| --- | --- |",
    ]
    for variant in experiment.variants:
        lines.append(f"| {name_of(variant, experiment.axis)} | `{' '.join(variant.bindings) or '(none)'}` |")
    baselines = baselines_of(experiment)
    for metric, rows in result["comparison"]["metrics"].items():
        scores = {row["variant"]: [run["score"] for run in row["runs"]] for row in rows}
        lines += ["", f"## {metric}", "", "| variant | each seed | mean | 95 % interval | difference, seed by seed |"]
        lines.append("| --- | --- | --- | --- | --- |")
        for row in rows:
            found, baseline = scores[row["variant"]], baselines[row["variant"]]
            gain = "-" if baseline is None else difference(found, scores[baseline])
            cells = [row["variant"], " ".join(map(shown, found)), shown(row["value"]), span(row["interval"]), gain]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", f"![{metric}]({plot_file(name, metric)})"]
    against = (
        f"{experiment.axis} {experiment.variants[0].x:g} of the same line" if experiment.axis else experiment.baseline
    )
    lines += [
        "",
        f"A difference is to {against}: runs of one seed begin with the same weights and the same prompts. Its 95 % "
        "interval is Student's, over seeds; bold where it leaves out 0. Other intervals and bands are of the bootstrap "
        "over seeds, and too narrow for fewer than five.",
    ]
    return "\n".join(lines) + "\n"


def baselines_of(experiment: Experiment) -> dict[str, str | None]:
    """Returns what every variant is compared with, by their names: the first of its label where there is an axis."""
    named = [(name_of(variant, experiment.axis), variant) for variant in experiment.variants]
    first = {variant.label: name for name, variant in reversed(named)}
    found = {name: first[variant.label] if experiment.axis else experiment.baseline for name, variant in named}
    return {name: None if name == baseline else baseline for name, baseline in found.items()}


def difference(scores: Sequence[float | None], baseline: Sequence[float | None]) -> str:
    """Returns the mean of the differences of paired scores with Student's 95 % interval; bold where it leaves out 0."""
    gains = np.array(scores, np.float64) - np.array(baseline, np.float64)
    if len(gains) < 2 or not np.isfinite(gains).all():
        return "-"
    half = float(stdtrit(len(gains) - 1, 0.975) * gains.std(ddof=1) / math.sqrt(len(gains)))
    mean = float(gains.mean())
    text = f"{mean:+.3f}, {mean - half:+.3f} to {mean + half:+.3f}"
    return f"**{text}**" if abs(mean) > half else text


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def span(interval: Sequence[float | None]) -> str:
    return "-" if None in interval else f"{shown(interval[0])} to {shown(interval[1])}"


def write(name: str, comparison: Comparison, facts: Mapping[str, Any], pages: Path) -> None:
    """Writes NAME.json, the plots, and what stands below the mark of NAME.md.

    Args:
      facts: "seeds", "hardware" and "versions".
    """
    experiment = EXPERIMENTS[name]
    pages.mkdir(parents=True, exist_ok=True)
    for metric, rows in comparison.metrics.items():
        (pages / plot_file(name, metric)).write_text(plot(metric, rows, experiment) + "\n", encoding="utf-8")
    content = to_json(comparison)
    for rows in content["metrics"].values():
        for row in rows:
            del row["curve"], row["settings"]  # the plot has the one, the page the other
            row["runs"] = [{"seed": run["seed"], "score": run["score"]} for run in row["runs"]]
    result = {**facts, "comparison": content}
    (pages / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    page = pages / f"{name}.md"
    by_hand = page.read_text(encoding="utf-8").partition(MARK)[0] if page.exists() else f"# {experiment.title}\n\n"
    page.write_text(by_hand + MARK + "\n\n" + generated(name, experiment, result), encoding="utf-8")


def system() -> dict[str, str]:
    versions = f"jax {jax.__version__}, Python {platform.python_version()}"
    return {"hardware": f"{os.cpu_count()} CPU cores ({platform.machine()})", "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; what is in it is not run again")
    parser.add_argument("--only", nargs="*", choices=list(EXPERIMENTS), help="names of experiments")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no further variant begins")
    parser.add_argument("--pages", type=Path, default=PAGES, help="where pages, results and plots are written")
    args = parser.parse_args()
    start = time.monotonic()
    for name in args.only or EXPERIMENTS:
        experiment = EXPERIMENTS[name]
        runs = {}
        for variant in experiment.variants:
            if time.monotonic() - start > 60 * args.minutes:
                print(f"{name}: {len(runs)} of {len(experiment.variants)} variants are trained; call again to go on")
                return
            folder = folder_of(args.out, experiment, variant, args.seeds)
            train(experiment, variant, args.seeds, folder)
            found = [read_run(run) for run in find_runs([folder])[0]]
            runs[variant] = [run._replace(evals={**run.evals, **evaluated(run.folder)}) for run in found]
        write(name, compared(experiment, runs), {"seeds": args.seeds, **system()}, args.pages)
        print(f"{name}: {args.pages / name}.md", flush=True)


if __name__ == "__main__":
    main()
