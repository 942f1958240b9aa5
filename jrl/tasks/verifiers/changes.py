"""Whether scoring an item changed what a worker runs: such a worker scores nothing more.

It finds a verifier that patches a module, by accident or because the text that it evaluates does. It runs in the
process that it watches, so that text which knows of it can evade it: SECURITY.md.
"""

from __future__ import annotations

import _signal  # the names that `signal` makes of numbers cost more than all else here
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
    """The code of a worker before it scored anything, and the process's state that decides what it does."""

    members: list[tuple[Mapping[str, Any], tuple[str, ...], tuple[Any, ...]]]  # of what, names, values
    sizes: list[tuple[Mapping[str, Any], int]]
    functions: tuple[types.FunctionType, ...]
    codes: tuple[types.CodeType, ...]  # theirs
    state: tuple


def snapshot(rows: list[tuple[Verifier, Any]]) -> Snapshot:
    """Returns what scoring an item should leave as it is.

    These are the functions, classes and modules of jrl, the plugins and some of the standard library, and the way to
    modules, traces, timers, signals, environment and folder. Plain globals may change: a cache is no change of code.
    """
    plugins = {getattr(verifier.score, "__module__", None) for verifier, _ in rows}
    namespaces = []
    for name, module in list(sys.modules.items()):
        ours = name.partition(".")[0] == "jrl" or name in plugins or name == "__main__"
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
    """Whether anything of the snapshot is another now, or a global hides a builtin."""
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
