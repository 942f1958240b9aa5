"""Rows of a run's rollouts, chosen by their columns: what `jrl rollouts` prints and exports.

A condition is COLUMN OP VALUE; several are joined by `and`. It is read by a parser of its own, and a value is a number,
true, false, or a text: nothing in it is evaluated.
"""

from __future__ import annotations

import csv
import io
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl import paths
from jrl.config.errors import nearest
from jrl.run.report.rollouts import TEXTS, Snapshot, snapshot
from jrl.run.report.text import printable, printable_lines

BLOCK_ROWS = 4096  # read at a time
SHOWN = ("step", "reward", "example_id", "prompt", "completion")  # columns, where none are named
# In a file, where none are named: those of the layout `rollouts`, from which Dataset makes training data.
EXPORTED = ("step", "group", "reward", "valid", "example_id", "prompt", "completion")
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
    "contains": lambda text, part: part in text,
}  # fmt: skip
_CONDITION = re.compile(
    r"\s*(?P<column>[\w./%-]+)\s*(?P<op>==|!=|<=|>=|<|>|\bcontains\b)\s*"
    r"(?P<value>'[^']*'|\"[^\"]*\"|[^\s'\"]+)\s*(?:\band\b|$)"
)


class Condition(NamedTuple):
    column: str
    op: str  # one of OPERATORS
    value: float | str | bool


def parse_where(text: str) -> list[Condition]:
    """Returns the conditions of a text such as "reward < 0.5 and completion contains 'So'"; [] of an empty one.

    Raises: ValueError where it is something else, with the part that is.
    """
    conditions, place = [], 0
    while place < len(text.rstrip()):
        match = _CONDITION.match(text, place)
        if match is None:
            raise ValueError(f"--where: cannot read {text[place:].strip()!r}; write COLUMN OP VALUE, with OP one of "
                             f"{' '.join(OPERATORS)}, joined by `and`: \"reward < 0.5 and step >= 10\"")  # fmt: skip
        conditions.append(Condition(match["column"], match["op"], _value(match["value"])))
        place = match.end()
    if re.search(r"\band\s*$", text):
        raise ValueError("--where ends with `and`: a condition is missing")
    return conditions


def _value(text: str) -> float | str | bool:
    if text[0] in "'\"":
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text


def columns_of(folder: Path) -> dict[str, int]:
    """Returns the columns of a store and how many axes each has beside that of rows; texts have none.

    Raises: ValueError where there is no store.
    """
    return _columns(snapshot(folder))


def _columns(store: Snapshot) -> dict[str, int]:
    first = store.read(0, min(1, store.rows))
    return {name: 0 if name in TEXTS else np.ndim(value) - 1 for name, value in first.items()}


def chosen_columns(known: dict[str, int], asked: Sequence[str] | None, otherwise: Sequence[str] = SHOWN) -> list[str]:
    """Returns the columns to show: those asked for, else `otherwise` as far as they are there. Raises: ValueError for
    one that is not."""
    if not asked:
        return [name for name in otherwise if name in known]
    for name in asked:
        if name not in known:
            guess = nearest(name, known)
            hint = f"; did you mean {guess}?" if guess else "."
            raise ValueError(f"no column {name!r}{hint} The columns are {', '.join(sorted(known))}")
    return list(asked)


def select(folder: Path, conditions: Sequence[Condition], columns: Sequence[str], most: int | None) -> Iterator[dict]:
    """Yields the rows that meet every condition, oldest first: column -> number, text or nested lists. The store may be
    written by runs meanwhile; rows that come after the call are not seen.

    Args:
      most: rows to yield; None: all.

    Raises: ValueError for a column that is not there, or a condition that does not fit its column.
    """
    store = snapshot(folder)
    known = _columns(store)
    chosen_columns(known, columns)
    chosen_columns(known, [condition.column for condition in conditions] or None)
    for condition in conditions:
        _check(condition, known)
    found = 0
    for start in range(0, store.rows, BLOCK_ROWS):
        block = store.read(start, min(start + BLOCK_ROWS, store.rows))
        meets = np.ones(len(block["completion"]), bool)
        for condition in conditions:
            meets &= _meets(condition, block[condition.column])
        for i in np.flatnonzero(meets):
            if found == most:
                return
            found += 1
            yield {name: _plain(block[name][i]) for name in columns}


def _meets(condition: Condition, values: Any) -> np.ndarray:
    """Returns which values of a block meet the condition. A number is compared as the column holds it, so that 0.9 is
    the float32 nearest to it."""
    compare, value = OPERATORS[condition.op], condition.value
    if isinstance(values, list):
        return np.array([compare(text, value) for text in values], bool)
    return compare(values, values.dtype.type(value) if np.issubdtype(values.dtype, np.floating) else value)


def _check(condition: Condition, known: dict[str, int]) -> None:
    column, op, value = condition
    if known[column]:
        raise ValueError(f"--where: {column} holds an array in each row, which cannot be compared")
    if (column in TEXTS) != isinstance(value, str):
        kind = "text" if column in TEXTS else "a number"
        raise ValueError(f"--where: {column} is {kind}, and {value!r} is not" + (
            "; write a text in quotes" if column in TEXTS else ""))  # fmt: skip
    if op == "contains" and column not in TEXTS:
        raise ValueError(f"--where: `contains` is for texts, and {column} is a number")


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else np.asarray(value).tolist()


def show(row: dict[str, Any]) -> str:
    """Returns a row as lines: its numbers in one, each text under its name. Nothing in it commands a terminal."""
    numbers = [f"{name} {_short(value)}" for name, value in row.items() if name not in ("prompt", "completion")]
    lines = ["  ".join(numbers)] if numbers else []
    for name in ("prompt", "completion"):
        if name in row:
            lines.append(f"{name}: " + printable_lines(row[name]).replace("\n", "\n    "))
    return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return printable(value if isinstance(value, str) else json.dumps(value), 120)


def export(rows: Iterable[dict[str, Any]], columns: Sequence[str], path: Path) -> int:
    """Writes rows to a file by its ending, .jsonl or .csv, and returns how many. Raises: ValueError for another."""
    if path.suffix not in (".jsonl", ".csv"):
        raise ValueError(f"--out {path}: rows are written as .jsonl or .csv")
    text, count = io.StringIO(), 0
    writer = csv.DictWriter(text, columns, lineterminator="\n") if path.suffix == ".csv" else None
    if writer is not None:
        writer.writeheader()
    for row in rows:
        count += 1
        if writer is not None:
            writer.writerow({name: json.dumps(v) if isinstance(v, list) else v for name, v in row.items()})
        else:  # not finite: null, since JSON has no NaN
            text.write(json.dumps({name: _finite(value) for name, value in row.items()}, ensure_ascii=False) + "\n")
    paths.write_bytes_atomic(path, text.getvalue().encode())
    return count


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
