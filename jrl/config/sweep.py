"""Sweeps as list algebra. A point is a list of bindings, a sweep is a list of points; `load` takes one point.

grid(axis("AdamW.learning_rate", [1e-4, 3e-4]), axis("Run.seed", range(3)))   # 6 points
zip_(axis("Loop.lag", [0, 1]), axis("Run.name", ["on", "off"]))               # 2 points
chain(axis("Config.algo", ["@GRPO()", "@DAPO()"]), axis("Loop.lag", [1]))     # 3 points
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

Point = list[str]
Sweep = list[Point]


def axis(name: str, values: Iterable[Any]) -> Sweep:
    """Returns one point for each value. Text that begins with @ or % stays a reference; other text is quoted."""
    return [[f"{name} = {_literal(value)}"] for value in values]


def grid(*sweeps: Sweep) -> Sweep:
    """Returns every combination, the last sweep varying fastest."""
    return [list(itertools.chain(*points)) for points in itertools.product(*sweeps)]


def zip_(*sweeps: Sweep) -> Sweep:
    """Returns the first points joined, the second points joined, ... Raises ValueError on unequal lengths."""
    if len({len(sweep) for sweep in sweeps}) > 1:
        raise ValueError(f"zip_: sweeps of unequal lengths {[len(sweep) for sweep in sweeps]}")
    return [list(itertools.chain(*points)) for points in zip(*sweeps)]


def chain(*sweeps: Sweep) -> Sweep:
    """Returns the points of all sweeps, one sweep after the other."""
    return list(itertools.chain(*sweeps))


def _literal(value: Any) -> str:
    if isinstance(value, str) and value[:1] in ("@", "%"):
        return value
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    raise TypeError(f"a sweep holds numbers, text, booleans, None and lists of them, not {type(value).__name__}")
