"""Selects rows of a run's stored rollouts by conditions on their columns, for `jrl rollouts`.

A condition is COLUMN OP VALUE; `and` joins several. A value is a number, true, false, a text, or a name of a code in
`CODES`. Conditions are parsed and never evaluated as code.
"""

from __future__ import annotations

import csv
import enum
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
from jrl.run.report.summary import finite
from jrl.run.report.text import printable, printable_lines
from jrl.tasks.verdict import Status
from jrl.types import Finish

BLOCK_ROWS = 4096  # rows read at once
SHOWN = ("step", "reward", "valid", "example_id", "prompt", "completion")  # default columns; not valid: not scored
# Default columns of a file: those of the layout `rollouts`, from which Dataset makes training data.
EXPORTED = ("step", "group", "reward", "valid", "example_id", "prompt", "completion")
SHOWN_BELOW = ("prompt", "completion")  # columns with a line each
CODES: dict[str, type[enum.IntEnum]] = {"verdict": Status, "finish": Finish}  # columns of codes that have names
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
    """Returns the conditions in a text such as "reward < 0.5 and completion contains 'So'"; [] for an empty text.

    Raises: ValueError for a text that cannot be parsed, with the part at fault.
    """
    conditions, position = [], 0
    while position < len(text.rstrip()):
        match = _CONDITION.match(text, position)
        if match is None:
            raise ValueError(f"--where: cannot read {text[position:].strip()!r}; write COLUMN OP VALUE, with OP one of "
                             f"{' '.join(OPERATORS)}, joined by `and`: \"reward < 0.5 and step >= 10\"")  # fmt: skip
        conditions.append(Condition(match["column"], match["op"], _value(match["value"])))
        position = match.end()
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
    """Returns {column: number of axes besides the row axis} for a store; a text column has 0.

    Raises: ValueError if there is no store.
    """
    return _columns(snapshot(folder))


def _columns(store: Snapshot) -> dict[str, int]:
    first = store.read(0, min(1, store.rows))
    return {name: 0 if name in TEXTS else np.ndim(value) - 1 for name, value in first.items()}


def chosen_columns(known: dict[str, int], requested: Sequence[str] | None, default: Sequence[str] = SHOWN) -> list[str]:
    """Returns the columns to show: the requested ones, else those of `default` that exist.

    Raises: ValueError for a requested column that does not exist.
    """
    if not requested:
        return [name for name in default if name in known]
    for name in requested:
        if name not in known:
            guess = nearest(name, known)
            hint = f"; did you mean {guess}?" if guess else "."
            raise ValueError(f"no column {name!r}{hint} The columns are {', '.join(sorted(known))}")
    return list(requested)


def select(folder: Path, conditions: Sequence[Condition], columns: Sequence[str], most: int | None) -> Iterator[dict]:
    """Yields the rows that match every condition, oldest first, as {column: number, text or nested lists}. A run may
    append to the store meanwhile; rows written after the iteration has begun are not seen.

    Args:
      most: number of rows to yield at most; None: all.

    Raises: ValueError for a column that does not exist, or a condition that does not fit its column.
    """
    store = snapshot(folder)
    known = _columns(store)
    chosen_columns(known, columns)
    chosen_columns(known, [condition.column for condition in conditions] or None)
    conditions = [_with_code(condition) for condition in conditions]
    for condition in conditions:
        _check_condition(condition, known)
    num_yielded = 0
    for start in range(0, store.rows, BLOCK_ROWS):
        block = store.read(start, min(start + BLOCK_ROWS, store.rows))
        matches = np.ones(len(block["completion"]), bool)
        for condition in conditions:
            matches &= _matches(condition, block[condition.column])
        for i in np.flatnonzero(matches):
            if num_yielded == most:
                return
            num_yielded += 1
            yield {name: _plain(block[name][i]) for name in columns}


def _matches(condition: Condition, values: Any) -> np.ndarray:
    """Returns which values of a block match the condition, [rows] bool. For a floating-point column the number is cast
    to the column's dtype first: 0.9 matches the float32 nearest to it."""
    compare, value = OPERATORS[condition.op], condition.value
    if isinstance(values, list):
        return np.array([compare(text, value) for text in values], bool)
    return compare(values, values.dtype.type(value) if np.issubdtype(values.dtype, np.floating) else value)


def _with_code(condition: Condition) -> Condition:
    """Returns the condition with the code of a name such as "wrong". Raises: ValueError for an unknown name."""
    codes = CODES.get(condition.column)
    if codes is None or not isinstance(condition.value, str):
        return condition
    for code in codes:
        if code.name.lower() == condition.value.lower():
            return condition._replace(value=float(code))
    names = ", ".join(f"{code.name.lower()} ({code.value})" for code in codes)
    raise ValueError(f"--where: {condition.value!r} is no {condition.column}. It is one of {names}")


def _check_condition(condition: Condition, known: dict[str, int]) -> None:
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
    """Returns a row as text: its numbers on one line, then each text after its name. Control characters are escaped.

    A code is followed by its name."""
    numbers = [
        f"{name} {_short(value)}{_code_name(name, value)}" for name, value in row.items() if name not in SHOWN_BELOW
    ]
    lines = ["  ".join(numbers)] if numbers else []
    for name in SHOWN_BELOW:
        if name in row:
            lines.append(f"{name}: " + printable_lines(row[name]).replace("\n", "\n    "))
    return "\n".join(lines)


def _code_name(column: str, value: Any) -> str:
    return next((f" ({code.name.lower()})" for code in CODES.get(column, ()) if code == value), "")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return printable(value if isinstance(value, str) else json.dumps(value), 120)


def export(rows: Iterable[dict[str, Any]], columns: Sequence[str], path: Path) -> int:
    """Writes rows to a .jsonl or .csv file and returns how many. Raises: ValueError for another suffix."""
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
        else:
            text.write(json.dumps(finite(row), ensure_ascii=False) + "\n")
    paths.write_bytes_atomic(path, text.getvalue().encode())
    return count
