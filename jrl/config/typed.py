"""Checks values against annotations. Only int to float and list to tuple are converted."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jrl.config.errors import nearest
from jrl.config.schema import is_config, options_of
from jrl.config.syntax import Macro, Reference

LARGEST = (2 - 2**-23) * 2.0**127  # the largest finite float32: programs hold floats in float32


class Misfit(Exception):
    """A value that does not fit. `inside` is the position in the value ("[1]"), `reason` what was expected and given.

    `specific` is True if the reason says more than "expects this type, got that".
    """

    def __init__(self, reason: str, inside: str = "", *, specific: bool = True):
        super().__init__(f"{inside} {reason}".strip())
        self.reason = reason
        self.inside = inside
        self.specific = specific


Instance = Callable[[Any, Mapping[str, type]], Any]


def fit(value: Any, hint: Any, rows: Mapping[str, type], instance: Instance) -> Any:
    """Returns `value` converted to the type `hint`.

    Args:
      value: literals in lists, tuples and dicts, and anything that `instance` accepts where a dataclass is expected.
      hint: int, float, str, bool, None, Literal, tuple, dict[str, ...], dataclasses, unions of them, or Any for a row.
      rows: what Any stands for, row name -> class.
      instance: (value, allowed classes by name) -> an instance of one of them; raises Misfit.

    An int fits float and a list fits a tuple; nothing else is converted (True is not an int, 1.0 is not an int).

    Raises: Misfit.
    """
    options = options_of(hint)
    if value is None and type(None) in options:
        return None
    allowed = {cls.__name__: cls for cls in options if is_config(cls)}
    if Any in options:
        allowed.update(rows)
    literal = [option for option in options if option is not Any and not is_config(option)]
    if allowed and (isinstance(value, Reference) or not [o for o in literal if o is not type(None)]):
        return instance(value, allowed)
    for widen in (False, True):  # 1 in `int | float` stays an int
        misfits = []
        for option in literal:
            try:
                return _fit_option(value, option, rows, instance, widen)
            except Misfit as misfit:
                if option is not type(None):
                    misfits.append(misfit)
    if allowed:
        try:
            return instance(value, allowed)
        except Misfit:
            raise Misfit(f"expects {type_name(hint, rows)}, got {show(value)}") from None
    if len(misfits) == 1 and misfits[0].specific:
        raise misfits[0]
    raise Misfit(f"expects {type_name(hint, rows)}, got {show(value)}")


def type_name(hint: Any, rows: Mapping[str, type]) -> str:
    """Returns an annotation in words for an error message."""
    options = options_of(hint)
    if len(options) > 1:
        return " or ".join(type_name(option, rows) for option in options)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return "one of " + ", ".join(f"@{name}()" for name in rows) if rows else "a part"
    if is_config(hint):
        return f"@{hint.__name__}()"
    if origin is Literal:
        return "one of " + ", ".join(repr(part) for part in parts)
    if origin is tuple:
        if len(parts) == 2 and parts[1] is Ellipsis:
            return f"a list of {type_name(parts[0], rows)}"
        return "a list of (" + ", ".join(type_name(part, rows) for part in parts) + ")"
    if origin is dict:
        return f"a dict of str to {type_name(parts[1], rows)}"
    return "None" if hint is type(None) else hint.__name__


def show(value: Any) -> str:
    """Returns a value as the user wrote it, with its type if that is not obvious."""
    if isinstance(value, Reference | Macro):
        return str(value)
    if value is None or isinstance(value, bool):
        return repr(value)
    text = _as_written(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def show_resolved(value: Any) -> str:
    """Returns a value of a resolved configuration as text; for an instance, its class."""
    if is_config(type(value)):
        return f"@{type(value).__name__}()"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(show_resolved(item) for item in value) + "]"
    return repr(value)


def _as_written(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_as_written(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_as_written(key)}: {_as_written(item)}" for key, item in value.items()) + "}"
    return str(value) if isinstance(value, Reference | Macro) else repr(value)


def _fit_option(value: Any, option: Any, rows: Mapping[str, type], instance: Instance, widen: bool) -> Any:
    origin, parts = typing.get_origin(option), typing.get_args(option)
    if origin is tuple and isinstance(value, list | tuple):
        if len(parts) == 2 and parts[1] is Ellipsis:
            parts = (parts[0],) * len(value)
        elif parts == ((),):
            parts = ()
        if len(parts) != len(value):
            raise Misfit(f"expects {len(parts)} items, got {len(value)}")
        return tuple(_inside(f"[{i}]", item, part, rows, instance) for i, (item, part) in enumerate(zip(value, parts)))
    if origin is dict and isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise Misfit(f"expects str keys, got {show(key)}")
        return {key: _inside(f"[{key!r}]", item, parts[1], rows, instance) for key, item in value.items()}
    if origin is Literal:
        for part in parts:
            if type(part) is type(value) and part == value:
                return part
        guess = nearest(value, [part for part in parts if isinstance(part, str)]) if isinstance(value, str) else None
        hint = f"; did you mean {guess!r}?" if guess else ""
        raise Misfit(f"expects {type_name(option, rows)}, got {show(value)}{hint}")
    if option is float and widen and type(value) is int:
        if abs(value) > LARGEST:
            raise Misfit(f"expects a float of at most {LARGEST:.2g}, got an int of {value.bit_length()} bits")
        return float(value)
    if option in (int, float, str, bool) and type(value) is option:
        if option is float and not math.isfinite(value):
            raise Misfit(f"expects a finite float, got {value}")
        if option is float and abs(value) > LARGEST:
            raise Misfit(f"expects a float of at most {LARGEST:.2g}, which float32 can hold; got {value}")
        return value
    raise Misfit(f"expects {type_name(option, rows)}, got {show(value)}", specific=False)


def _inside(where: str, item: Any, hint: Any, rows: Mapping[str, type], instance: Instance) -> Any:
    try:
        return fit(item, hint, rows, instance)
    except Misfit as misfit:
        raise Misfit(misfit.reason, where + misfit.inside) from None
