"""Compares a function or class with the one that running its source again gives, as far as can be determined."""

from __future__ import annotations

import enum
import inspect
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from jrl.tasks.verifiers.definitions import MISSING, function_of, literal_of, methods_of, undecorated

CHANGEABLE = (list, dict, set, bytearray, np.ndarray)  # mutable types
DUNDER = re.compile("__.*__|_abc_impl")  # names that Python and libraries assign


def difference(here: Any, there: Any, originals: Mapping[int, Any]) -> str:
    """Returns how a function or class (`here`) differs from the one of its source (`there`); "" if it does not.

    Args:
      originals: {id(value there): the value here} of the names of the part.
    """
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
        return ""  # a value that is written as source
    if isinstance(here, types.FunctionType):
        for name in ("__defaults__", "__kwdefaults__"):
            if not is_same(getattr(here, name), getattr(there, name), originals):
                return "a default has another value"
        if "__wrapped__" in vars(here) and _constants(here) != _constants(there):
            return "a decorator was defined again"
        # The function's own free variables are globals there. A container that a decorator fills here is filled there
        # too.
        cells = [(a.cell_contents, b.cell_contents) for a, b in zip(here.__closure__ or (), there.__closure__ or ())]
        if not all(is_same(a, b, originals) for a, b in cells if not isinstance(a, dict | list | set)):
            return "a decorator has another argument"
    mine, others = vars(here), vars(there)
    for name in mine | others:
        if not DUNDER.fullmatch(name) and not is_same(mine.get(name, MISSING), others.get(name, MISSING), originals):
            return f"its attribute {name!r} is not part of its source"
    if ("__wrapped__" in mine) != ("__wrapped__" in others):
        return "it is wrapped by a decorator that its own lines do not name"
    return difference(mine["__wrapped__"], others["__wrapped__"], originals) if "__wrapped__" in mine else ""


def is_same(here: Any, there: Any, originals: Mapping[int, Any]) -> bool:
    """Returns whether two values are the same as far as can be determined: values that cannot be written as source need
    only have the same type."""
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
    """Returns the names that contain one mutable object here but two there; None if there are none.

    Args:
      values: (name, value here, value there).
    """
    known: dict[int, tuple[str, Any, Any]] = {}  # keeps the object alive, so that its id is not reused
    for name, here, there in values:
        for mine, other in _changeable(here, there):
            first, _, its_other = known.setdefault(id(mine), (name, mine, other))
            if its_other is not other:
                return [*dict.fromkeys([first, name])]
    return None


def _changeable(here: Any, there: Any) -> Iterator[tuple[Any, Any]]:
    """Yields pairs of mutable objects: in a value, the defaults of a function or the attributes of a class here, and at
    the same position there. `difference` reports mismatches of structure."""
    if isinstance(here, types.FunctionType) or "__wrapped__" in getattr(here, "__dict__", ()):
        mine, other, names = undecorated(here), undecorated(there), ("__defaults__", "__kwdefaults__")
        parts = [(getattr(mine, name, None), getattr(other, name, None)) for name in names]
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
    """Returns what distinguishes a function or class from a replacement."""
    if isinstance(thing, types.FunctionType):
        return thing.__code__.co_name, inspect.getargs(thing.__code__)
    return thing.__name__ if isinstance(thing, type) else type(thing)


def _constants(function: types.FunctionType) -> list[str | None]:
    """Returns the literals of a function's constants, without the code of inner functions."""
    constants = function.__code__.co_consts
    return [literal_of(constant) for constant in constants if not isinstance(constant, types.CodeType)]


def _attributes(cls: type) -> dict[str, Any]:
    """Returns the attributes that a class got in its body or later, without dunders other than its methods."""
    methods = {method.__name__: method for method in methods_of(cls)}
    return {name: v for name, v in vars(cls).items() if name in methods or not DUNDER.fullmatch(name)}
