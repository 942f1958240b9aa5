"""How often a judge prefers the answers of one policy to those of another: what `jrl eval` adds for policies that a
judge compares (M11). A comparison is of the first samples of a prompt, asked in both orders."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.ops.win_rates import length_controlled, win_rate
from jrl.tasks.example import Example
from jrl.tasks.judges import Group, Judge, OpenJudge, Pairwise, open_client, preflight
from jrl.tools.evaluation import aligned


def comparing(judges: Sequence[Judge]) -> list[Judge]:
    """Returns the judges that compare completions with one another."""
    return [judge for judge in judges if isinstance(judge.grading, Pairwise) and judge.grading.against == "group"]


def judged_wins(
    judges: Sequence[Judge], results: Sequence[Mapping[str, Any]], examples: Sequence[Example], folder: Path | None
) -> dict[str, list[list[dict[str, float | None] | None]]]:
    """Returns {judge: table}; table[i][j] is how often result i wins over result j, None on the diagonal.

    Args:
      judges: those that compare.
      results: reports of `jrl.tools.evaluation.reevaluate`, of the same prompts.
      examples: of those prompts.
      folder: where answers are kept, so that none is asked for twice; None: they are not. A question that failed is
        asked again.

    Raises: ValueError where a judge cannot be asked; JudgeStopped where it fails too often.
    """
    tables = {}
    with contextlib.ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for config in judges:
            preflight(config)
            judge = OpenJudge(config, open_client(config, place / f"{config.name}.answers.jsonl"), None)
            stack.callback(judge.close)
            tables[config.name] = win_table(judge, results, examples)
    return tables


def win_table(
    judge: OpenJudge, results: Sequence[Mapping[str, Any]], examples: Sequence[Example]
) -> list[list[dict[str, float | None] | None]]:
    """Returns the table of one judge, as `judged_wins` has it."""
    count = len(results)
    table: list[list[dict[str, float | None] | None]] = [[None] * count for _ in range(count)]
    named = {example.prompt_digest().hex(): example for example in examples}  # of equal prompts one
    asked = {name: example for name, example in named.items() if name in results[0]["completions"]}
    texts = [[result["completions"][name] for name in asked] for result in results]
    for i, j in itertools.combinations(range(count), 2):
        pairs = [*zip(texts[i], texts[j])]
        groups = [
            Group((i, j, number), example, pair) for number, (example, pair) in enumerate(zip(asked.values(), pairs))
        ]
        graded = judge.collect(judge.submit(groups))
        # Of a group of two, R20 is the mean of both orders, NaN where the judge failed in one of them.
        wins = np.array([values[0] for values in graded.rows[::2]], np.float64)
        longer = np.array([len(a) - len(b) for a, b in pairs], np.float64)
        table[i][j], table[j][i] = summary(wins, longer), summary(1 - wins, -longer)
    return table


def summary(wins: np.ndarray, longer: np.ndarray) -> dict[str, float | None]:
    """Returns a win rate with its interval, "length_controlled", and how many prompts were judged ("n") and how many
    were not ("failed").

    Args:
      wins: [n] float, as of `swapped_wins`. longer: [n] float, characters of the winner's answer less the other's.
    """
    found = win_rate(wins)
    number = lambda x: float(x) if np.isfinite(x) else None  # of no prompts there is no mean
    named = {"mean": found.mean, "low": found.low, "high": found.high}
    named["length_controlled"] = length_controlled(wins, longer)
    return {**{name: number(x) for name, x in named.items()}, "n": found.n, "failed": int(np.isnan(wins).sum())}


def lines(name: str, sources: Sequence[str], table: Sequence[Sequence[dict[str, float | None] | None]]) -> list[str]:
    """Returns the lines of a judge's table: in how many percent of the prompts the row wins over the column, a tie
    counting half, and after the bar that at equal lengths."""

    def cell(found: dict[str, float | None] | None) -> str:
        if found is None:
            return ""
        if found["mean"] is None:
            return "-"
        shown = [f"{100 * found[key]:.1f}" for key in ("mean", "low", "high", "length_controlled")]
        return "{} [{}, {}] | {}".format(*shown)

    rows = [[f"{name}: wins over", *sources], *([source, *map(cell, row)] for source, row in zip(sources, table))]
    failed = sum(found["failed"] for row in table for found in row if found is not None) // 2
    out = ["", *aligned(rows)]
    return [*out, f"{failed} comparisons could not be judged"] if failed else out
