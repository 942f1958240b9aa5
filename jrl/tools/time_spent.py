"""Where a run's time goes, what it waits for, and its goodput, from its metrics and goodput records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jrl.run.report.goodput import PARTS, goodput
from jrl.run.report.text import duration, percent

RECENT = 50  # rows of metrics that are read
NAMED = {"sample": "sampling", "score": "scoring", "prepare": "packing", "update": "the update", "save": "saving",
         "evaluate": "evaluating", "wait": "data and other processes", "compile": "compiling",
         "restart": "restarts", "trace": "the trace of --profile", "other": "the rest"}  # fmt: skip
# {part of a step: (what the run waits for, what to try)}
ADVICE = {
    "sample": ("for completions: the device is decoding",
               "Sampler.slots closer to prompts x samples, or fewer slots where lengths differ much; a smaller "
               "Sampler.completion_length; Sampler.attention = 'auto'"),
    "score": ("for the verifiers and judges: completions are being scored",
              "more Scoring.workers, a larger Judge.concurrency, or Online.lag = 1, so that the device samples the "
              "next step meanwhile"),
    "prepare": ("for the host, which packs rows", "fewer and longer rows: Learner.row_length"),
    "update": ("for the update: the device is learning",
               "Decoder.remat or Published.remat = 'none' where memory allows, larger micro-batches "
               "(Learner.micro_batch_tokens), fewer Learner.epochs; Online.lag = 1 hides scoring and host work behind "
               "it"),
    "save": ("for checkpoints to be written",
             "a larger Checkpoint.every, or Log.rollouts = False where nobody reads them; see whether the disk of the "
             "run is slow"),
    "evaluate": ("for evaluations", "a larger Eval.every, fewer Eval.prompts or Eval.samples, a larger Eval.batch"),
    "wait": ("for data, or for other processes of the run",
             "a smaller Data.prompt_length where many prompts are skipped; on several hosts look for a slow one"),
    "compile": ("for the compiler", "keep JAX's compilation cache (leave out --no-compile-cache)"),
    "other": ("for its own host work: metrics, rollouts, or whoever reads the steps of jrl.steps",
              "Log.rollouts = False, fewer Log.samples; `jrl train --profile 3:6` shows what it is"),
}  # fmt: skip


def time_lines(rows: Iterable[Mapping[str, Any]], records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns where the time of a step goes, what the run waits for and what to try, one line each; then the goodput
    since the first start. [] for a run without such times.

    Args:
      rows: of metrics.jsonl. The first row of every process is skipped if there are others: its step compiled.
      records: of goodput.jsonl.
    """
    timed = [row for row in rows if "time/other_seconds" in row][-RECENT:]
    steady = [row for row in timed if "time/start_seconds" not in row] or timed
    lines = []
    if steady:
        step_parts = [part for part in (*PARTS, "prepare") if part != "trace"]  # only runs with --profile have it
        spent = {part: sum(row.get(f"time/{part}_seconds", 0.0) for row in steady) for part in step_parts}
        if steady is timed:  # only first steps, whose compilation is not typical
            spent["compile"] = 0.0
        total = sum(spent.values())
        parts = sorted(((seconds, part) for part, seconds in spent.items() if seconds >= total / 100), reverse=True)
        shares = ", ".join(f"{NAMED[part]} {percent(seconds / total)}" for seconds, part in parts)
        seconds, largest_part = parts[0]
        waits_for, advice = ADVICE[largest_part]
        lines = [
            f"time of a step, mean of {len(steady)}: {total / len(steady):.3g} s: {shares}",
            f"the run waits {waits_for}: {percent(seconds / total)} of a step",
            f"to try, where it is not so yet: {advice}",
        ]
    if (overall := goodput(records)) is not None and overall["total"]:
        lost = {part: share for part, share in overall["share"].items() if part not in ("sample", "score", "update")}
        rest = ", ".join(f"{NAMED[part]} {percent(s)}" for part, s in sorted(lost.items(), key=lambda x: -x[1]) if s)
        starts = f"{overall['starts']} start{'s' if overall['starts'] > 1 else ''}"
        lines.append(
            f"goodput since the first start: {percent(overall['goodput'])} of {duration(overall['total'])} in {starts} "
            f"were sampling, scoring and updates; {rest}"
        )
    return lines
