"""How often a judge prefers one policy's answers to another's (M11), for `jrl eval` with a judge that compares. It
compares the first samples of each prompt, in both orders."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.ops.win_rates import length_controlled, win_rate
from jrl.run.report.text import aligned
from jrl.tasks.example import Example
from jrl.tasks.judges import Group, Judge, OpenJudge, Pairwise, open_client, preflight
from jrl.tools.evaluation import percent_cell


def comparing(judges: Sequence[Judge]) -> list[Judge]:
    """Returns the judges that compare completions with one another."""
    return [judge for judge in judges if isinstance(judge.grading, Pairwise) and judge.grading.against == "group"]


def judged_wins(
    judges: Sequence[Judge], results: Sequence[Mapping[str, Any]], examples: Sequence[Example], folder: Path | None
) -> dict[str, list[list[dict[str, float | None] | None]]]:
    """Returns {judge: table}; table[i][j] is how often result i wins over result j, None on the diagonal.

    Args:
      judges: judges that compare completions.
      results: reports of `jrl.tools.evaluation.reevaluate` on the same prompts.
      examples: the examples of those prompts.
      folder: caches the judges' answers, so that a question is not asked twice unless it failed;
        None: the answers are not kept after the call.

    Raises: ValueError if a judge does not respond as required; JudgeStopped if it fails too often.
    """
    tables = {}
    with contextlib.ExitStack() as stack:
        cache_dir = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for config in judges:
            preflight(config)
            judge = OpenJudge(config, open_client(config, cache_dir / f"{config.name}.answers.jsonl"), None)
            stack.callback(judge.close)
            tables[config.name] = win_table(judge, results, examples)
    return tables


def win_table(
    judge: OpenJudge, results: Sequence[Mapping[str, Any]], examples: Sequence[Example]
) -> list[list[dict[str, float | None] | None]]:
    """Returns the table of one judge, as in `judged_wins`."""
    count = len(results)
    table: list[list[dict[str, float | None] | None]] = [[None] * count for _ in range(count)]
    by_prompt = {example.prompt_digest().hex(): example for example in examples}  # equal prompts share one
    asked = {name: example for name, example in by_prompt.items() if name in results[0]["completions"]}
    texts = [[result["completions"][name] for name in asked] for result in results]
    for i, j in itertools.combinations(range(count), 2):
        pairs = [*zip(texts[i], texts[j])]
        groups = [
            Group((i, j, number), example, pair) for number, (example, pair) in enumerate(zip(asked.values(), pairs))
        ]
        graded = judge.collect(judge.submit(groups))
        # For a group of two, R20 is the mean over both orders, NaN if the judge failed in either.
        wins = np.array([values[0] for values in graded.rows[::2]], np.float64)
        longer = np.array([len(a) - len(b) for a, b in pairs], np.float64)
        table[i][j], table[j][i] = summary(wins, longer), summary(1 - wins, -longer)
    return table


def summary(wins: np.ndarray, longer: np.ndarray) -> dict[str, float | None]:
    """Returns a win rate with its interval, "length_controlled", and how many prompts were judged ("n") and how many
    were not ("failed").

    Args:
      wins: [n] float, as `swapped_wins` returns them. longer: [n] float, characters of the first answer minus those of
        the second.
    """
    interval = win_rate(wins)
    number = lambda x: float(x) if np.isfinite(x) else None  # no prompts have no mean
    named = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    named["length_controlled"] = length_controlled(wins, longer)
    return {**{name: number(x) for name, x in named.items()}, "n": interval.n, "failed": int(np.isnan(wins).sum())}


def lines(name: str, sources: Sequence[str], table: Sequence[Sequence[dict[str, float | None] | None]]) -> list[str]:
    """Returns the lines of a judge's table: the percentage of prompts on which the row wins over the column, ties
    counting half, and after the bar the same at equal lengths."""

    def cell(wins: dict[str, float | None] | None) -> str:
        if wins is None:
            return ""
        if wins["mean"] is None:
            return "-"
        return f"{percent_cell(wins)} | {100 * wins['length_controlled']:.1f}"

    rows = [[f"{name}: wins over", *sources], *([source, *map(cell, row)] for source, row in zip(sources, table))]
    failed = sum(wins["failed"] for row in table for wins in row if wins is not None) // 2
    text = ["", *aligned(rows)]
    return [*text, f"{failed} comparisons could not be judged"] if failed else text
