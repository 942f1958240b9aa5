"""Inspection of a function or class that is defined in a notebook cell or a script."""

from __future__ import annotations

import builtins
import cmath
import collections
import decimal
import fractions
import math
import pathlib
import re
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

MISSING = object()  # the meaning of an undefined name


def undecorated(value: Any) -> Any:
    """Returns the function that decorators wrap, or `value` if it is not wrapped."""
    while not isinstance(value, type) and "__wrapped__" in getattr(value, "__dict__", ()):
        value = value.__dict__["__wrapped__"]
    return value


def methods_of(definition: type) -> list[types.FunctionType]:
    """Returns the functions that are defined in the body of a class, not those assigned to it."""
    inside = [undecorated(function_of(value)) for value in vars(definition).values()]
    functions = [value for value in inside if isinstance(value, types.FunctionType)]
    return [method for method in functions if method.__code__.co_qualname.startswith(f"{definition.__qualname__}.")]


def function_of(value: Any) -> Any:
    """Returns the function of a static method, class method or property; any other value unchanged."""
    for holder in ("__func__", "fget", "func"):
        value = getattr(value, holder, value) if not isinstance(value, types.FunctionType | type) else value
    return value


def meaning_of(definition: Any, name: str) -> Any:
    """Returns the value of a name in the scope around `definition`, or MISSING."""
    if isinstance(definition, types.FunctionType) and name in definition.__code__.co_freevars:
        try:
            return definition.__closure__[definition.__code__.co_freevars.index(name)].cell_contents
        except ValueError:  # it was deleted, or has no value yet
            return MISSING
    return globals_of(definition).get(name, getattr(builtins, name, MISSING))


def globals_of(definition: Any) -> Mapping[str, Any]:
    """Returns the globals of the scope where a function or class was defined."""
    if isinstance(definition, types.FunctionType):
        return definition.__globals__
    spaces = [method.__globals__ for method in methods_of(definition)]
    return spaces[0] if spaces else vars(sys.modules[definition.__module__])


def literal_of(value: Any) -> str | None:
    """Returns the source of a number, a string, a pattern, an array or the like, the same in every process; None for
    anything else."""
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return f"float({str(value)!r})"
    if kind is int and value.bit_length() > 10_000:
        return hex(value)  # Python limits decimal output to a few thousand digits
    if value is None or kind in (bool, int, float, str, bytes) or (kind is complex and cmath.isfinite(value)):
        return repr(value)
    if kind in BY_TYPE:
        return BY_TYPE[kind](value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufU":
        array = f"asarray({literal_of(value.tolist())}, {value.dtype.str!r})"
        array += f".reshape({value.shape})" * (value.size == 0)
        return _of("numpy", array if value.ndim else f"{array}[()]")
    return container_of(value, literal_of)


def container_of(value: Any, source_of: Callable[[Any], str | None]) -> str | None:
    """Returns the source of a tuple, list, set or dict, given that of its elements; None for anything else."""
    kind = type(value)
    if kind not in (tuple, list, set, frozenset, dict):
        return None
    entries = value.items() if kind is dict else [(item,) for item in value]
    items = [[source_of(part) for part in entry] for entry in entries]
    if any(part is None for item in items for part in item):
        return None
    texts = [": ".join(item) for item in items]
    if kind in (set, frozenset):
        return f"{kind.__name__}([{', '.join(sorted(texts))}])"
    left, right = {tuple: "()", list: "[]", dict: "{}"}[kind]
    return f"{left}{', '.join(texts)}{',' * (kind is tuple and len(texts) == 1)}{right}"


_of = lambda module, text: f"__import__({module!r}).{text}"
BY_TYPE: dict[type, Callable[[Any], str]] = {
    re.Pattern: lambda x: _of("re", f"compile({x.pattern!r}, {x.flags})"),
    re.RegexFlag: lambda x: _of("re", f"RegexFlag({x.value})"),
    decimal.Decimal: lambda x: _of("decimal", repr(x)),
    fractions.Fraction: lambda x: _of("fractions", repr(x)),
    range: repr,
    pathlib.PosixPath: lambda x: _of("pathlib", f"Path({str(x)!r})"),
    collections.Counter: lambda x: _of("collections", f"Counter({literal_of(dict(x))})"),
}
