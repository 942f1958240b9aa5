"""Where in a user's part an error arose, for the message that ends a command or a check."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import re
import traceback
import types

from jrl.tasks.verifiers.source import is_of_part

CONTRACT = "jrl.algos.contract"  # not imported: it imports JAX
OF_TRACED = {"ConcretizationTypeError", "TracerArrayConversionError", "TracerIntegerConversionError"}


def part_location(error: BaseException) -> str | None:
    """Returns where an exception comes from in the user's own part, or in a module that it imports: "It was raised by
    your own FILE, line N, in FUNCTION". Also where a function that the part called raised it, and which function
    returned what was refused.

    None if no part was involved.
    """
    if (function := _refused_function(error)) is not None and is_of_part(function.__globals__):
        code = function.__code__
        return f"It was returned by your own {code.co_filename}, line {code.co_firstlineno}, in {code.co_name}"
    inside = ""  # the function of jrl that the part called
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if is_of_part(frame.f_globals):
            raised = f"It was raised by {inside}, called from" if inside else "It was raised by"
            return f"{raised} your own {frame.f_code.co_filename}, line {line}, in {name}{_advice(error)}"
        if module.partition(".")[0] == "jrl":
            inside = f"{module}.{name}"
    return None


def _advice(error: BaseException) -> str:
    """Returns what to do about a common mistake of an objective, as the next sentence without its period; "": it is
    none of them."""
    if OF_TRACED & {cls.__name__ for cls in type(error).__mro__}:
        return (
            ". The function is compiled, and this value is known only when it runs: use jnp.where instead of `if`, and "
            "jnp instead of numpy, float() and item(). The floats of a configuration are such values too"
        )
    if isinstance(error, AttributeError | TypeError) and "NoneType" in str(error):
        missing = [
            f"{name}.{field.name}"
            for frame, line in traceback.walk_tb(error.__traceback__)
            if is_of_part(frame.f_globals)
            for name, value in frame.f_locals.items()
            if type(value).__module__ == CONTRACT and dataclasses.is_dataclass(value)
            for field in dataclasses.fields(value)
            if getattr(value, field.name) is None
            and re.search(rf"\b{name}\.{field.name}\b", linecache.getline(frame.f_code.co_filename, line))
        ]
        if missing:
            what = " and ".join(missing) + (" is" if len(missing) == 1 else " are")
            return f". There {what} None: an objective gets it only if its `needs` request it ({CONTRACT}.Needs)"
    return ""


def _refused_function(error: BaseException) -> types.FunctionType | None:
    """Returns the Python function whose result a WrongResult refuses; None: the error is another."""
    function = error.function if type(error).__name__ == "WrongResult" else None
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    return function if isinstance(function, types.FunctionType) else None
