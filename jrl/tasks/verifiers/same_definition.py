"""Whether a function or class is the same as one that its source was run again for, as far as can be seen."""

from __future__ import annotations

import enum
import inspect
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from jrl.tasks.verifiers.definitions import MISSING, function_of, literal_of, methods_of, undecorated

CHANGEABLE = (list, dict, set, bytearray, np.ndarray)  # what may be changed in place
DUNDER = re.compile("__.*__|_abc_impl")  # names that Python and libraries give values


def difference(here: Any, there: Any, originals: Mapping[int, Any]) -> str:
    """Returns in what a function or class and the one of its source are not the same, "" where they are."""
    if type(here).__name__ != type(there).__name__ or _kind(here) != _kind(there):
        return "it is wrapped or replaced by something that its own lines do not say"
    if isinstance(here, type):
        if not all(is_same(mine, other, originals) for mine, other in zip(here.__bases__, there.__bases__)):
            return "a class that it is derived from was defined again"
        mine, others = _attributes(here), _attributes(there)
        for name in mine | others:
            if not is_same(mine.get(name, MISSING), others.get(name, MISSING), originals):
                return f"its attribute {name!r} has another value"
        return ""
    if not isinstance(here, types.FunctionType) and "__wrapped__" not in getattr(here, "__dict__", ()):
        return ""  # a value that is written out
    if isinstance(here, types.FunctionType):
        for place in ("__defaults__", "__kwdefaults__"):
            if not is_same(getattr(here, place), getattr(there, place), originals):
                return "a default has another value"
        if "__wrapped__" in vars(here) and _constants(here) != _constants(there):
            return "a decorator was defined again"
        # Of the function itself they are globals there; what a decorator has filled here it fills there.
        cells = [(a.cell_contents, b.cell_contents) for a, b in zip(here.__closure__ or (), there.__closure__ or ())]
        if not all(is_same(a, b, originals) for a, b in cells if not isinstance(a, dict | list | set)):
            return "a decorator has another argument"
    mine, others = vars(here), vars(there)
    for name in mine | others:
        if not DUNDER.fullmatch(name) and not is_same(mine.get(name, MISSING), others.get(name, MISSING), originals):
            return f"its attribute {name!r} is no part of its source"
    if ("__wrapped__" in mine) != ("__wrapped__" in others):
        return "it is wrapped by a decorator that its own lines do not name"
    return difference(mine["__wrapped__"], others["__wrapped__"], originals) if "__wrapped__" in mine else ""


def is_same(here: Any, there: Any, originals: Mapping[int, Any]) -> bool:
    """Returns whether two values are the same as far as can be seen: a value that cannot be written as source need only
    be of the same type."""
    if here is there or originals.get(id(there), MISSING) is here:
        return True
    literal = literal_of(here)
    if literal is not None or literal_of(there) is not None:
        return literal == literal_of(there)
    if id(there) in originals or isinstance(here, type) != isinstance(there, type):
        return False
    if isinstance(here, Mapping | Sequence | Set):
        mine, others = ((*one.items(),) if isinstance(one, Mapping) else (*one,) for one in (here, there))
        are_same = isinstance(here, Set) or all(is_same(a, b, originals) for a, b in zip(mine, others))
        return len(mine) == len(others) and are_same
    if isinstance(here, types.FunctionType | type):
        return not difference(here, there, originals)
    if isinstance(here, enum.Enum):
        return is_same(here.value, there.value, originals)
    inside, other = function_of(here), function_of(there)
    if inside is not here:
        return is_same(inside, other, originals)
    if type(here).__qualname__ != type(there).__qualname__:
        return False
    mine, others = (getattr(one, "__dict__", {}) for one in (here, there))
    of_a_cell = type(here) is not type(there)
    return not of_a_cell or all(is_same(mine.get(n, MISSING), others.get(n, MISSING), originals) for n in mine | others)


def split_object(values: Iterable[tuple[str, Any, Any]]) -> list[str] | None:
    """Returns the names that hold one changeable object here, and two there; None where there are none.

    Args:
      values: name, what it means here, and there.
    """
    known: dict[int, tuple[str, Any, Any]] = {}  # with the object: an identity may be used again once it is gone
    for name, here, there in values:
        for mine, other in _changeable(here, there):
            first, _, its_other = known.setdefault(id(mine), (name, mine, other))
            if its_other is not other:
                return [*dict.fromkeys([first, name])]
    return None


def _changeable(here: Any, there: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the changeable objects that a value, the defaults of a function or the attributes of a class hold here,
    with those in their places there. Where the two are not alike, `difference` says so."""
    if isinstance(here, types.FunctionType) or "__wrapped__" in getattr(here, "__dict__", ()):
        mine, other, places = undecorated(here), undecorated(there), ("__defaults__", "__kwdefaults__")
        parts = [(getattr(mine, place, None), getattr(other, place, None)) for place in places]
    elif isinstance(here, type):
        mine, others = _attributes(here), _attributes(there) if isinstance(there, type) else {}
        parts = [(mine[name], others[name]) for name in mine.keys() & others.keys() if not callable(mine[name])]
    elif type(here) is not type(there):
        return
    else:
        if isinstance(here, CHANGEABLE):
            yield here, there
        if isinstance(here, dict):
            parts = [(here[key], there[key]) for key in here.keys() & there.keys()]
        else:
            parts = zip(here, there) if isinstance(here, tuple | list) else ()
    for mine, other in parts:
        yield from _changeable(mine, other)


def _kind(thing: Any) -> Any:
    """Returns what tells a function or class from another that was put in its place."""
    if isinstance(thing, types.FunctionType):
        return thing.__code__.co_name, inspect.getargs(thing.__code__)
    return thing.__name__ if isinstance(thing, type) else type(thing)


def _constants(function: types.FunctionType) -> list[str | None]:
    """Returns what a function has in it that is no code of a function inside it."""
    return [literal_of(one) for one in function.__code__.co_consts if not isinstance(one, types.CodeType)]


def _attributes(cls: type) -> dict[str, Any]:
    """Returns what a class has been given in its body and since."""
    made = {method.__name__: method for method in methods_of(cls)}
    return {name: v for name, v in vars(cls).items() if name in made or not DUNDER.fullmatch(name)}
