"""Compares runs: groups them into variants by their settings, and scores each variant with intervals (M6 to M10)."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.config import nearest
from jrl.config.sweep import gin_text
from jrl.config.syntax import read_statements
from jrl.experiment import Config
from jrl.ops import statistics
from jrl.ops.statistics import (
    Interval,
    interquartile_mean,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
    stratified_bootstrap,
)
from jrl.tools.sweep.members import short_names
from jrl.tools.sweep.runs import FINGERPRINTS, RunResult, score, series
from jrl.tools.sweep.settings import SEED, is_data_file

Array = np.ndarray
STATISTICS = {"mean": statistics.mean, "iqm": interquartile_mean, "gap": lambda scores: optimality_gap(scores, TARGET)}
TARGET = 1.0  # the score that an optimality gap is measured from
PROFILE_POINTS = 100
CONFIDENCE = 0.95
FEW_RUNS = 5
CURVE_POINTS = 200  # most points of a curve; a longer one is averaged over windows
CURVE_DRAWS = 1000
STAGES = "Config.stages"
MOST_LABEL = 100  # characters of a label


# A comma before NAME= that is outside of quotes: the quotes after it are balanced.
_BETWEEN_PAIRS = re.compile(r""",\s*(?=[A-Za-z_][\w./]*\s*=)(?=(?:[^'"]|'[^']*'|"[^"]*")*$)""")


class Variant(NamedTuple):
    """Runs that within each task differ only in their seed. Tasks are the runs' differences besides the compared
    settings."""

    label: str
    settings: Mapping[str, str]  # the compared ones
    tasks: tuple[tuple[RunResult, ...], ...]  # the same tasks in the same order in every variant

    @property
    def runs(self) -> list[RunResult]:
        return [run for task in self.tasks for run in task]


class Curve(NamedTuple):
    """The mean over a variant's runs at each step, with its interval; NaN if a task has one run."""

    steps: Array  # [points] float64
    mean: Array  # [points]
    low: Array  # [points]
    high: Array  # [points]


class VariantResult(NamedTuple):
    """The result of one variant in one metric."""

    variant: Variant
    scores: tuple[tuple[float, ...], ...]  # of each task's runs; NaN for a run without the metric
    value: Interval  # of the statistic over the runs that have a score
    better: Interval | None  # probability of improvement over the baseline; None for the baseline, or without one
    curve: Curve


class Comparison(NamedTuple):
    """The rows of every metric, in the order of the variants."""

    statistic: str  # of STATISTICS
    compared: tuple[str, ...]  # settings in which variants differ
    tasks: tuple[str, ...]  # settings in which the tasks of a variant differ
    baseline: str | None  # the label of the baseline variant
    metrics: Mapping[str, tuple[VariantResult, ...]]
    notes: tuple[str, ...]  # caveats for the reader


def compare(
    runs: Sequence[RunResult],
    metrics: Sequence[str],
    *,
    by: Sequence[str] = (),
    swept: Sequence[str] = (),
    baseline: str | None = None,
    statistic: str = "mean",
    notes: Sequence[str] = (),
) -> Comparison:
    """Returns the comparison of runs.

    Args:
      metrics: names in metrics.jsonl, or of evaluations, such as "eval/after_rl".
      by: the settings to compare. Whatever else differs defines tasks, within which runs are resampled. Empty: compare
        everything that differs.
      swept: settings to compare even if they do not differ: a sweep may have finished only one variant.
      baseline: "NAME=VALUE,..." that matches one variant. The others are compared with it.

    Raises: ValueError for a name or a baseline that matches nothing, for two runs with the same variant, task and seed,
    and for variants with different tasks.
    """
    variants, compared, tasks = group(runs, by, swept)
    found = None if baseline is None else variants.index(find_variant(variants, compared, baseline))
    variants, described = with_short_labels(variants)
    base = None if found is None else variants[found]
    rows = {metric: tuple(_row(variant, base, metric, STATISTICS[statistic]) for variant in variants)
            for metric in metrics}  # fmt: skip
    messages = [
        *notes,
        *described,
        *(f"{run.source} is not finished; its last step is {_last_step(run)}" for run in runs if not run.finished),
        *(
            f"{run.source} was continued with a change after step {step} (`history` in its manifest.json)"
            for run in runs
            for step in run.changed_after
        ),
        *(
            f"{name} is not the same in all runs, so a difference may come from the code in it (RUN/parts has copies)"
            for name in changed_parts(runs)
        ),
    ]
    if STAGES in (*compared, *tasks):
        messages.append(f"{STAGES} is not the same in all runs: of what several stages have, such as a learning rate, "
                        "a name without a scope is that of the first Online stage, or else of the first")  # fmt: skip
    for metric, results in rows.items():
        for row in results:
            missing = [run.source for run, value in zip(row.variant.runs, _flat(row.scores)) if math.isnan(value)]
            messages += [f"{source} has no {metric}, and is left out of it" for source in missing]
    fewest = min(len(task) for variant in variants for task in variant.tasks)
    if fewest < 2:
        alone = "a variant with a task of one run" if tasks else "a variant of one run"
        messages.append(f"{alone} has no interval: what another seed would give is unknown")
    elif fewest < FEW_RUNS:
        of_tasks = " of a task" if tasks else ""
        messages.append(f"bootstrap intervals of fewer than {FEW_RUNS} runs{of_tasks} are too narrow; train more seeds")
    return Comparison(statistic, compared, tasks, base.label if base else None, rows, tuple(messages))


def group(
    runs: Sequence[RunResult], by: Sequence[str] = (), swept: Sequence[str] = ()
) -> tuple[list[Variant], tuple[str, ...], tuple[str, ...]]:
    """Returns the variants in the order of their first run, the compared settings, and those that define tasks."""
    if not runs:
        raise ValueError("there are no runs to compare")
    runs = with_moved_files(runs, swept)
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    plain = [tuple(run.settings.get(name) for name in names if name not in FINGERPRINTS) for run in runs]
    for name in FINGERPRINTS:  # left out if the other settings determine it
        if len({(other, run.settings.get(name)) for other, run in zip(plain, runs)}) == len(set(plain)):
            names = [other for other in names if other != name]
    represents = differing_settings(runs, names, swept)
    differing = list(dict.fromkeys(represents.values()))
    requested = [find_name(represents.get(name, name), differing, names) for name in by]
    compared = requested or differing
    others = [name for name in differing if name not in compared and not follows(name, compared, runs)]
    keyed: dict[tuple[str | None, ...], dict[tuple[str | None, ...], list[RunResult]]] = {}
    for run in runs:
        variant, task = (tuple(run.settings.get(name) for name in part) for part in (compared, others))
        peers = keyed.setdefault(variant, {}).setdefault(task, [])
        if twins := [other for other in peers if other.seed == run.seed]:
            raise ValueError(f"{twins[0].source} and {run.source} are the same run: one configuration, one seed")
        peers.append(run)
    tasks = list(dict.fromkeys(task for by_task in keyed.values() for task in by_task))
    shown = shown_settings(compared, list(keyed))
    variants = []
    for key, by_task in keyed.items():
        settings = {name: value for name, value in zip(compared, key) if value is not None}
        label = label_of(settings, shown)
        if missing := [task for task in tasks if task not in by_task]:
            lacks = ", ".join(
                f"no {name}" if value is None else f"{name}={value}" for name, value in zip(others, missing[0])
            )
            raise ValueError(
                f"{label} has no run with {lacks}, which another variant has: variants are compared on the same tasks. "
                "Leave out --by, or name all that you compare"
            )
        variants.append(Variant(label, settings, tuple(tuple(by_task[task]) for task in tasks)))
    return variants, tuple(compared), tuple(others)


def with_moved_files(runs: Sequence[RunResult], swept: Sequence[str] = ()) -> list[RunResult]:
    """Returns runs in which a data file has one path wherever the data are the same: where it is does not matter. Paths
    that were swept stay, and so do those that alone tell two runs apart: the files may be equal."""
    first: dict[tuple[str, str], str] = {}
    names = {name for run in runs for name in run.settings if is_data_file(name) and name not in swept}
    path = lambda run, name, value: first.setdefault((run.settings.get("data", value), name), value)
    moved = lambda run, stay: run._replace(settings={
        name: path(run, name, value) if name in names and (name, value) not in stay else value
        for name, value in run.settings.items()
    })  # fmt: skip
    same: dict[tuple, list[RunResult]] = {}
    for run in runs:
        same.setdefault((run.seed, *sorted(moved(run, ()).settings.items())), []).append(run)
    stay = {(name, run.settings[name]) for twins in same.values() for run in twins for name in names & {*run.settings}
            if len({twin.settings[name] for twin in twins}) > 1}  # fmt: skip
    return [moved(run, stay) for run in runs]


def changed_parts(runs: Sequence[RunResult]) -> list[str]:
    """Returns the names of the parts files that two runs have in different versions."""
    versions = {(name, digest) for run in runs for name, digest in run.parts.items()}
    count = collections.Counter(name for name, _ in versions)
    return sorted(name for name in count if count[name] > 1)


def differing_settings(runs: Sequence[RunResult], names: Sequence[str], swept: Sequence[str]) -> dict[str, str]:
    """Returns {setting: its representative} for the settings in which runs differ, and for those that were swept, which
    may have one value so far. If the same field of several parts varies identically over the runs, one binding set them
    all: the first represents them."""
    values = {name: tuple(run.settings.get(name) for run in runs) for name in names}
    first: dict[tuple[str, tuple[str | None, ...]], str] = {}
    representative: dict[str, str] = {}
    for name in names:
        if len(set(values[name])) > 1:
            representative[name] = first.setdefault((unscoped(name), values[name]), name)
    differing = {unscoped(name) for name in representative}
    only_swept = {name: name for name in swept if name in values and name not in differing}
    settings = representative | only_swept
    return {name: settings[name] for name in names if name in settings}


def follows(name: str, compared: Sequence[str], runs: Sequence[RunResult]) -> bool:
    """Returns whether the compared settings determine a setting whose section some runs lack: a field of an objective
    or an optimizer that only one variant has. A run of a version without this one field has the section."""
    variant = lambda run: tuple(run.settings.get(other) for other in compared)
    values = {(variant(run), run.settings.get(name)) for run in runs}
    sections = [{other.rpartition(".")[0] for other in run.settings} for run in runs if name not in run.settings]
    lacks = bool(sections) and name.rpartition(".")[0] not in set.union(*sections)
    return lacks and len(values) == len({key for key, _ in values})


def unscoped(name: str) -> str:
    """Returns a name without its scope: "AdamW.learning_rate" for "warm/AdamW.learning_rate"."""
    return name.rpartition("/")[2]


def shown_settings(compared: Sequence[str], keys: Sequence[tuple[str | None, ...]]) -> list[str]:
    """Returns the settings to show in labels: those that every variant has, and others that they do not determine.

    An objective of another class has settings that the others lack: its name stands for those in which its own variants
    do not differ.
    """
    by_setting = list(zip(*keys))
    common = [values for values in by_setting if None not in values]
    of_common = list(zip(*common)) if common else [()] * len(keys)
    determined = lambda values: len(set(zip(of_common, values))) == len(set(of_common))
    return [name for name, values in zip(compared, by_setting) if values in common or not determined(values)]


def label_of(settings: Mapping[str, str], shown: Sequence[str]) -> str:
    names = short_names(shown)
    return ", ".join(f"{names[name]}={settings[name]}" for name in shown if name in settings) or "all runs"


def find_name(name: str, differing: Sequence[str], names: Sequence[str]) -> str:
    """Returns the setting that a name refers to: itself, or the only field of that name, in any scope. Runs do not keep
    the scopes that their configurations were written with.

    Args:
      differing: settings in which runs differ. names: all settings.

    Raises: ValueError for a name that matches none or several of `differing`.
    """
    fields = [other.rpartition(".")[2] for other in differing]
    wanted = name if name in names else unscoped(name)
    by_field = [other for other, field in zip(differing, fields) if wanted in (field, unscoped(other))]
    matches = [name] if name in differing else by_field
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ValueError(f"{name} may be {' or '.join(matches)}; write the full name")
    if name in (SEED, short_names([SEED])[SEED]):
        raise ValueError(f"{SEED} is not compared: runs that differ in it alone are one variant")
    if name in names or name in [other.rpartition(".")[2] for other in names]:
        raise ValueError(
            f"{name} is the same in all runs; they differ in {', '.join(differing) or 'their seeds alone'}"
        )
    guess = nearest(name, [*differing, *fields])
    hint = f"; did you mean {guess}?" if guess else f"; they differ in {', '.join(differing) or 'their seeds alone'}"
    raise ValueError(f"runs do not differ in {name!r}{hint}")


def with_short_labels(variants: Sequence[Variant]) -> tuple[Sequence[Variant], list[str]]:
    """Returns variants of one run each by the names of these runs, where they differ in so much that a label would not
    fit into a table, and notes with their settings; other variants as they are."""
    if max(len(variant.label) for variant in variants) <= MOST_LABEL or any(len(one.runs) > 1 for one in variants):
        return variants, []
    return (
        [variant._replace(label=variant.runs[0].source) for variant in variants],
        [f"{variant.runs[0].source} has {variant.label}" for variant in variants],
    )


def find_variant(variants: Sequence[Variant], compared: Sequence[str], baseline: str) -> Variant:
    """Returns the variant that matches "NAME=VALUE,...". Raises ValueError if none or several do."""
    if not compared:
        raise ValueError(f"the baseline {baseline!r} needs a second variant; all runs have the same settings")
    runs = [run for variant in variants for run in variant.runs]
    # A full name may be a setting that another represents (differing_settings).
    differs = lambda name: len({run.settings.get(name) for run in runs}) > 1
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    find = lambda name: name if differs(name) else find_name(name, compared, names)
    pairs = [(find(name), value) for name, value in read_baseline(baseline)]
    matches = lambda run: all(same_value(run.settings.get(name) or "", value) for name, value in pairs)
    matching = [variant for variant in variants if all(map(matches, variant.runs))]
    if len(matching) == 1:
        return matching[0]
    listed = "; ".join(variant.label for variant in matching or variants)
    raise ValueError(f"the baseline {baseline!r} fits {'several variants' if matching else 'no variant'}: {listed}")


def read_baseline(text: str) -> list[tuple[str, str]]:
    """Returns the (name, value) pairs of "NAME=VALUE,NAME=VALUE", with values in gin syntax. Raises ValueError."""
    pieces = _BETWEEN_PAIRS.split(text.strip())
    pairs = []
    for piece in pieces:
        name, equals, value = piece.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise ValueError(f"a baseline is NAME=VALUE, such as learning_rate=1e-3; got {piece!r}")
        (statement,) = read_statements(None, [f"x.y={value.strip()}"], Config)
        pairs.append((name.strip(), gin_text(statement.value)))
    return pairs


def same_value(first: str, second: str) -> bool:
    """Returns whether two gin texts have the same value, as "1" and "1.0" do."""
    try:
        return float(first) == float(second)
    except ValueError:
        return first == second


def curve_of(variant: Variant, metric: str) -> Curve:
    """Returns a metric over the steps that all of a variant's runs have, with a bootstrap band over runs.

    Non-finite values do not count; a step without a finite value is left out.
    """
    metric_series = [series(run, metric) for task in variant.tasks for run in task]
    common = np.array(sorted(set.intersection(*(set(steps.tolist()) for steps, _ in metric_series))), np.int64)
    values = np.stack([value[np.isin(steps, common)] for steps, value in metric_series])  # [runs, steps]
    width = max(1, math.ceil(len(common) / CURVE_POINTS))
    starts = range(0, len(common), width)
    steps = np.array([np.mean(common[start : start + width]) for start in starts])
    points = np.array([_finite_mean(values[:, start : start + width], axis=1) for start in starts]).reshape(
        len(starts), len(metric_series)
    )
    has_value = np.isfinite(points).any(axis=1)
    steps, points = steps[has_value], points[has_value].T  # [runs, points]
    mean = _finite_mean(points, axis=0)
    if min(map(len, variant.tasks)) < 2 or not len(steps):
        return Curve(steps, mean, np.full(len(steps), math.nan), np.full(len(steps), math.nan))
    rng = np.random.default_rng(0)
    draw = lambda n: rng.multinomial(n, np.full(n, 1 / n), size=CURVE_DRAWS)  # how often each run is drawn
    drawn = np.concatenate([draw(len(task)) for task in variant.tasks], axis=1)  # [draws, runs]
    finite = np.isfinite(points)
    counts = drawn @ finite.astype(np.float64)  # [draws, points]
    sums = drawn @ np.where(finite, points, 0.0)
    resampled = np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)
    quantile = np.nanquantile if np.isnan(resampled).any() else np.quantile  # which is ten times as fast
    low, high = quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    return Curve(steps, mean, low, high)


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Returns a comparison as JSON values; non-finite numbers are null."""
    return {
        "statistic": comparison.statistic,
        "confidence": CONFIDENCE,
        "compared": list(comparison.compared),
        "tasks": list(comparison.tasks),
        "baseline": comparison.baseline,
        "metrics": {
            metric: [{**_row_json(row), "profile": profile(row, rows)} for row in rows]
            for metric, rows in comparison.metrics.items()
        },
        "notes": list(comparison.notes),
    }


def profile(row: VariantResult, rows: Sequence[VariantResult]) -> dict[str, list[float]]:
    """Returns M8 of a variant's runs, {"thresholds", "shares"}: the share of its scores above each threshold, on a grid
    from the lowest to the highest score of all variants. All tasks must have the same scale."""
    finite = lambda row: [value for value in _flat(row.scores) if math.isfinite(value)]
    scores = [value for other in rows for value in finite(other)]
    if not finite(row):
        return {"thresholds": [], "shares": []}
    thresholds = np.linspace(min(scores), max(scores), PROFILE_POINTS)
    shares = performance_profile(np.array(finite(row)), thresholds)
    return {"thresholds": thresholds.tolist(), "shares": shares.tolist()}


def table(comparison: Comparison) -> str:
    """Returns a comparison as text: one table per metric, one line per variant."""
    blocks = []
    for metric, rows in comparison.metrics.items():
        lines = [header(comparison), *([*cells(row, comparison.baseline)] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*lines)]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        blocks.append("\n".join([metric, *(f"  {line}" for line in text)]))
    return "\n\n".join(
        [*blocks, *(["\n".join(f"note: {note}" for note in comparison.notes)] if comparison.notes else [])]
    )


STATISTIC_NAMES = {"mean": "mean", "iqm": "interquartile mean", "gap": f"optimality gap to {TARGET:g}"}


def header(comparison: Comparison) -> list[str]:
    """Returns the head of a table's columns, as `cells` has them."""
    better = [] if comparison.baseline is None else ["P(higher than baseline)"]
    return ["variant", "runs", STATISTIC_NAMES[comparison.statistic], "95 % interval", *better]


def cells(row: VariantResult, baseline: str | None) -> list[str]:
    """Returns the cells of a table's row: variant, runs, value, interval and, with a baseline, M9."""
    row_cells = [row.variant.label, str(row.value.n), number(row.value.mean), interval(row.value)]
    if baseline is None:
        return row_cells
    if row.better is None:
        return [*row_cells, "baseline"]
    return [*row_cells, f"{number(row.better.mean)} {interval(row.better)}".strip()]


def number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def interval(estimate: Interval) -> str:
    return "" if math.isnan(estimate.low) else f"[{number(estimate.low)}, {number(estimate.high)}]"


def _row(variant: Variant, base: Variant | None, metric: str, statistic: statistics.Statistic) -> VariantResult:
    scores = tuple(tuple(score(run, metric) for run in task) for task in variant.tasks)
    value = stratified_bootstrap(_scored(scores), statistic, confidence=CONFIDENCE)
    better = None
    if base is not None and variant is not base:
        against = [[score(run, metric) for run in task] for task in base.tasks]
        better = probability_of_improvement(_scored(scores), _scored(against), confidence=CONFIDENCE)
    return VariantResult(variant, scores, value, better, curve_of(variant, metric))


def _scored(tasks: Sequence[Sequence[float]]) -> list[Array]:
    return [np.array([value for value in task if math.isfinite(value)]) for task in tasks]


def _flat(tasks: Sequence[Sequence[float]]) -> list[float]:
    return [value for task in tasks for value in task]


def _finite_mean(values: Array, axis: int) -> Array:
    """Returns the mean of the finite values along an axis; NaN if there are none."""
    finite = np.isfinite(values)
    counts = finite.sum(axis=axis)
    return np.where(counts > 0, np.where(finite, values, 0.0).sum(axis=axis) / np.maximum(counts, 1), math.nan)


def _last_step(run: RunResult) -> int:
    return run.rows[-1]["step"] if run.rows else 0


def _row_json(row: VariantResult) -> dict[str, Any]:
    values = _flat(row.scores)
    return {
        "variant": row.variant.label,
        "settings": dict(row.variant.settings),
        "value": _null(row.value.mean),
        "interval": [_null(row.value.low), _null(row.value.high)],
        "runs": [
            {"run": run.source, "seed": run.seed, "score": _null(value)} for run, value in zip(row.variant.runs, values)
        ],
        "probability_of_improvement": None
        if row.better is None
        else {"value": _null(row.better.mean), "interval": [_null(row.better.low), _null(row.better.high)]},
        "curve": {name: [_null(float(x)) for x in values_of] for name, values_of in row.curve._asdict().items()},
    }


def _null(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
