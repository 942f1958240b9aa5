"""Where in a user's part an error arose, for the message that ends a command or a check."""

from __future__ import annotations

import functools
import traceback
import types

from jrl.tasks.verifiers.source import is_of_part


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
            return f"{raised} your own {frame.f_code.co_filename}, line {line}, in {name}"
        if module.partition(".")[0] == "jrl":
            inside = f"{module}.{name}"
    return None


def _refused_function(error: BaseException) -> types.FunctionType | None:
    """Returns the Python function whose result a WrongResult refuses; None: the error is another."""
    function = error.function if type(error).__name__ == "WrongResult" else None
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    return function if isinstance(function, types.FunctionType) else None
