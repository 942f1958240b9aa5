"""Detects whether scoring an item changed the code that a worker runs. Such a worker scores no further items.

It finds a verifier that patches a module, by accident or through text that it evaluates. It runs in the process that it
watches, so text that knows about it can evade it: SECURITY.md.
"""

from __future__ import annotations

import _signal  # `signal` converts numbers to enums, which would take most of the time here
import builtins
import operator
import os
import signal
import sys
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from jrl.tasks.verifiers.contract import Verifier

LIBRARY = ("builtins", "json", "math", "random", "re", "socket", "struct")
CODE = operator.attrgetter("__code__")
OTHER_CODE = (types.ModuleType, property, classmethod, staticmethod)
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


class Snapshot(NamedTuple):
    """The code of a worker and the process state that affects it, before it scored anything."""

    members: list[tuple[Mapping[str, Any], tuple[str, ...], tuple[Any, ...]]]  # namespace, names, values
    sizes: list[tuple[Mapping[str, Any], int]]
    functions: tuple[types.FunctionType, ...]
    codes: tuple[types.CodeType, ...]  # of the functions
    state: tuple


def snapshot(rows: list[tuple[Verifier, Any]]) -> Snapshot:
    """Returns what scoring an item must not change.

    This covers the functions, classes and modules of jrl, the parts files and part of the standard library, and the
    import path, traces, timers, signals, environment and working directory. Plain globals may change: a cache is not
    code.
    """
    scorers = {getattr(verifier.score, "__module__", None) for verifier, _ in rows}
    namespaces = []
    for name, module in list(sys.modules.items()):
        ours = name.partition(".")[0] == "jrl" or name in scorers or name == "__main__"
        if ours or name.partition(".")[0] in LIBRARY:
            namespaces.append(vars(module))
        if ours:
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            namespaces += [vars(value) for value in classes if value.__module__ == name]
    members, functions = [], []
    for namespace in namespaces:
        code = {name: value for name, value in namespace.items() if callable(value) or isinstance(value, OTHER_CODE)}
        members.append((namespace, tuple(code), tuple(code.values())))
        inner = [getattr(value, "__func__", value) for value in code.values()]
        functions += [value for value in inner if isinstance(value, types.FunctionType)]
    sizes = [(namespace, len(namespace)) for namespace in namespaces]
    return Snapshot(members, sizes, tuple(functions), tuple(map(CODE, functions)), _state(rows))


def changed(before: Snapshot, rows: list[tuple[Verifier, Any]]) -> bool:
    """Returns whether anything in the snapshot has changed, or a new global hides a builtin."""
    for namespace, names, values in before.members:
        if not all(map(operator.is_, map(namespace.get, names), values)):
            return True
    for namespace, size in before.sizes:
        if len(namespace) != size and any(name in vars(builtins) for name in list(namespace)[size:]):
            return True
    return not all(map(operator.is_, map(CODE, before.functions), before.codes)) or _state(rows) != before.state


def _state(rows: list[tuple[Verifier, Any]]) -> tuple:
    return (
        [
            (id(verifier), id(verifier.score), id(getattr(verifier.score, "__code__", None)), repr(config))
            for verifier, config in rows
        ],
        [*map(id, sys.meta_path), *map(id, sys.path_hooks), *sys.path],
        (sys.gettrace() is None, sys.getprofile() is None, sys.getrecursionlimit()),
        [signal.getitimer(timer) for timer in TIMERS],
        [_signal.getsignal(number) for number in range(1, signal.NSIG)],
        (dict(os.environ), os.getcwd()),
    )
