"""Whether scoring an item changed what a worker runs: such a worker scores nothing more.

It finds a verifier that patches a module, by accident or because the text that it evaluates does. It runs in the
process that it watches, so that text which knows of it can evade it: SECURITY.md.
"""

from __future__ import annotations

import _signal  # the names that `signal` makes of numbers cost more than all else here
import builtins
import os
import signal
import sys
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from jrl.tasks.verifiers.contract import Verifier

WATCHED = ("jrl", "builtins", "json", "math", "random", "re", "socket", "struct")
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


class Snapshot(NamedTuple):
    """The code of a worker before it scored anything, and the process's state that decides what it does."""

    members: list[tuple[Mapping[str, Any], str, Any, Any]]  # of what, its name, the value, and its code
    sizes: list[tuple[Mapping[str, Any], int]]
    state: tuple


def snapshot(rows: list[tuple[Verifier, Any]]) -> Snapshot:
    """Returns what scoring an item should leave as it is.

    These are the functions, classes and modules of jrl, the plugins and some of the standard library, and the way to
    modules, traces, timers, signals, environment and folder. Plain globals may change: a cache is no change of code.
    """
    plugins = {getattr(verifier.score, "__module__", None) for verifier, _ in rows}
    namespaces = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in WATCHED or name in plugins or name == "__main__":
            namespaces.append(vars(module))
            namespaces += [
                vars(one) for one in vars(module).values() if isinstance(one, type) and one.__module__ == name
            ]
    members = [
        (namespace, name, value, _code(value))
        for namespace in namespaces
        for name, value in namespace.items()
        if callable(value) or isinstance(value, types.ModuleType | property | classmethod | staticmethod)
    ]
    return Snapshot(members, [(namespace, len(namespace)) for namespace in namespaces], _state(rows))


def changed(before: Snapshot, rows: list[tuple[Verifier, Any]]) -> bool:
    """Whether anything of the snapshot is another now, or a global hides a builtin."""
    for namespace, name, value, code in before.members:
        if namespace.get(name) is not value or (code is not None and _code(value) is not code):
            return True
    for namespace, size in before.sizes:
        if len(namespace) != size and any(name in vars(builtins) for name in list(namespace)[size:]):
            return True
    return _state(rows) != before.state


def _code(value: Any) -> Any:
    return getattr(value, "__code__", None)


def _state(rows: list[tuple[Verifier, Any]]) -> tuple:
    return (
        [(id(verifier), id(verifier.score), id(_code(verifier.score)), repr(config)) for verifier, config in rows],
        [*map(id, sys.meta_path), *map(id, sys.path_hooks), *sys.path],
        (sys.gettrace() is None, sys.getprofile() is None, sys.getrecursionlimit()),
        [signal.getitimer(timer) for timer in TIMERS],
        [_signal.getsignal(number) for number in range(1, signal.NSIG)],
        (dict(os.environ), os.getcwd()),
    )
