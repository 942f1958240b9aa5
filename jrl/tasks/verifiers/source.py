"""A user's verifiers as source text: how they reach the template, whichever way the run was started.

A parts file may import its neighbors: modules of the same folder. Their text travels with it.
"""

from __future__ import annotations

import ast
import builtins
import cmath
import dataclasses
import inspect
import linecache
import math
import re
import symtable
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

PART_MODULE = "jrl_part_"  # and its place: the name of a part's module
NEIGHBOR = "__jrl_neighbor__"  # an attribute of a neighbor's module: the Neighbor that it was run from


class Neighbor(NamedTuple):
    """A module of a parts file's folder that the file imports, or that another neighbor does."""

    name: str  # that it is imported by
    filename: str
    source: str


@dataclasses.dataclass(frozen=True)
class PartSource:
    """The text of one parts file, and the name its tracebacks show."""

    filename: str
    source: str
    neighbors: tuple[Neighbor, ...] = ()  # each after those that it imports

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> PartSource:
        return PartSource(fields["filename"], fields["source"], tuple(Neighbor(*n) for n in fields["neighbors"]))


def read_part(path: Path) -> PartSource:
    """Returns a parts file with the neighbors it imports, read and not run.

    An import inside a function counts, and a name of the standard library is never a neighbor.

    Raises: OSError and UnicodeDecodeError where a file cannot be read; SyntaxError naming the file; ValueError for a
        pipe, a socket or a device, and for neighbors that import each other.
    """
    from jrl import paths  # it reads buckets too, by HTTP and with numpy, which no process of verifiers needs

    neighbors: dict[str, Neighbor] = {}

    def add_neighbors(filename: str, source: str, importing: tuple[str, ...]) -> None:
        for name in _imported_names(ast.parse(source, filename)):
            beside = path.parent / f"{name}.py"
            if name in importing:
                raise ValueError(f"{filename} and {beside} import each other; move what both need into a third file")
            if name in neighbors or name in sys.stdlib_module_names or not beside.is_file():
                continue
            neighbor = Neighbor(name, str(beside), beside.read_text())
            add_neighbors(neighbor.filename, neighbor.source, (*importing, name))
            neighbors[name] = neighbor

    paths.check_not_special(path)
    source = path.read_text()
    add_neighbors(str(path), source, (path.stem,))
    return PartSource(str(path), source, tuple(neighbors.values()))


def _imported_names(tree: ast.Module) -> Iterator[str]:
    """Yields the top-level names of the modules that a file imports anywhere, in their order."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def load_module(part: PartSource, place: int) -> types.ModuleType:
    """Returns the module that a part is. Its neighbors can be imported by then, by the part and by whatever follows.

    Raises: ValueError where a neighbor has the name of another module that is loaded; whatever the part raises while
        it runs.
    """
    _load_neighbors(part)
    return _execute(f"{PART_MODULE}{place}", part.filename, part.source)


def _load_neighbors(part: PartSource) -> None:
    """Runs the neighbors of a part, unless just these were the last to be run under their names."""
    ours = [neighbor for neighbor in part.neighbors if not _is_imported(neighbor)]
    if all(getattr(sys.modules.get(n.name), NEIGHBOR, None) == n for n in ours):
        return
    for neighbor in ours:
        setattr(_execute(*neighbor), NEIGHBOR, neighbor)


def is_of_part(module_globals: Mapping[str, Any]) -> bool:
    """Whether these are the globals of a part's module, or of a neighbor's."""
    return NEIGHBOR in module_globals or module_globals.get("__name__", "").startswith(PART_MODULE)


def _is_imported(neighbor: Neighbor) -> bool:
    """Whether the user's own program has imported this file. Raises ValueError where the name is another module's."""
    module = sys.modules.get(neighbor.name)
    if module is None or hasattr(module, NEIGHBOR):
        return False
    other = getattr(module, "__file__", None)
    if other is None or Path(other).resolve() != Path(neighbor.filename).resolve():
        raise ValueError(
            f"{neighbor.filename} has the name of another module that is loaded, {other or 'a built-in one'}; give it "
            "another name"
        )
    return True


def _execute(name: str, filename: str, source: str) -> types.ModuleType:
    """Runs `source` as the module `name`.

    This is the one place in jrl that runs text as code, and the text is the user's own file: what the command line
    named or the notebook passed, never anything a model or a data set wrote.
    """
    module = types.ModuleType(name)
    module.__file__ = filename
    sys.modules[name] = module  # dataclasses look their annotations up there
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), module.__dict__)
    return module


def load_part(part: PartSource, place: int) -> Mapping[str, Any]:
    """Returns the VERIFIERS dict that a part defines; {} where it defines none.

    Raises:
        ValueError: the part's VERIFIERS is not a dict.
        Whatever the part raises while it runs.
    """
    verifiers = vars(load_module(part, place)).get("VERIFIERS", {})
    if not isinstance(verifiers, Mapping):
        raise ValueError(
            f"{part.filename}: VERIFIERS has type {type(verifiers).__name__}; it must be a dict: name -> row"
        )
    return verifiers


def part_of(functions: Mapping[str, Callable[..., Any]]) -> PartSource:
    """Returns verifier functions, from a notebook cell or a script, as a part whose VERIFIERS holds them by name.

    What a function uses comes along: modules are imported again, functions and classes of its own module are copied by
    source, numbers, strings and the like are written out.

    Args:
        functions: name in the table -> function (completion, example) -> float or Verdict.

    Raises:
        ValueError: a function has no source (a lambda, or typed on standard input), or uses an object that cannot be
            written as source; the message names it.
    """
    carried: dict[str, str] = {}
    for function in functions.values():
        _carry(function, function.__name__, carried)
    rows = ", ".join(f"{name!r}: {function.__name__}" for name, function in functions.items())
    lines = ["from __future__ import annotations", *carried.values(), f"VERIFIERS = {{{rows}}}"]
    return PartSource(f"<verifiers {', '.join(functions)}>", "\n\n".join(lines) + "\n")


def _carry(thing: Any, name: str, carried: dict[str, str]) -> None:
    """Adds the source of a function or class, and of what it uses, in the order in which it must be defined."""
    if not isinstance(thing, types.FunctionType | type):
        raise ValueError(
            f"the verifier {name!r} has type {type(thing).__name__}; it must be a function defined with `def`"
        )
    try:
        source = textwrap.dedent(inspect.getsource(thing))
        (tree,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise ValueError(
            f"{name!r} cannot be sent to the verifier processes, because its source cannot be found (standard input "
            "keeps none). Put it into a file and name that in `parts`"
        ) from error
    if not isinstance(tree, ast.FunctionDef | ast.ClassDef) or tree.name != name:
        raise ValueError(
            f"{name!r} must be defined by a `def` of that name of its own, not by a lambda or under another"
        )
    carried[name] = ""  # it may call itself
    for used in _names_used(tree):
        if used not in carried:
            has_meaning, value = _meaning(thing, used)
            if has_meaning:
                _carry_value(used, value, thing, carried)
    carried[name] = carried.pop(name) or source.rstrip()


def _carry_value(name: str, value: Any, user: Any, carried: dict[str, str]) -> None:
    """Adds one name that a carried function uses."""
    if isinstance(value, types.ModuleType):
        carried[name] = f"import {value.__name__} as {name}"
    elif isinstance(value, re.Pattern):
        carried[name] = f"import re\n{name} = re.compile({value.pattern!r}, {value.flags})"
    elif isinstance(value, types.FunctionType | type) and value.__module__ == user.__module__:
        _carry(value, name, carried)
    elif _importable(value):
        carried[name] = f"from {value.__module__} import {value.__qualname__} as {name}"
    elif (text := _literal(value)) is not None:
        carried[name] = f"{name} = {text}"
    else:
        raise ValueError(
            f"the verifier uses {name!r} of type {type(value).__name__}, which cannot be written as source for the "
            "verifier processes. Build it inside the function, or put both into a file and name that in `parts`"
        )


def _names_used(tree: ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    """Yields the names that a definition reads from outside of it, annotations aside, in their order.

    Raises: ValueError where it assigns a global: every process would have its own.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
    outside: set[str] = set()
    scopes = [symtable.symtable(ast.unparse(tree), tree.name, "exec")]
    for scope in scopes:
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            if symbol.is_declared_global() and symbol.is_assigned():
                raise ValueError(
                    f"{tree.name!r} assigns the global {symbol.get_name()!r}, of which every verifier process would "
                    "have its own; a verifier keeps nothing between calls"
                )
            if symbol.is_referenced() and (symbol.is_global() or scope is scopes[0]):
                outside.add(symbol.get_name())
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    yield from dict.fromkeys(name for name in names if name in outside and name != tree.name)


def _meaning(thing: Any, name: str) -> tuple[bool, Any]:
    """Returns (True, what a global or enclosing name of `thing` means), or (False, None) for a built-in."""
    if isinstance(thing, types.FunctionType):
        if name in thing.__code__.co_freevars:
            return True, thing.__closure__[thing.__code__.co_freevars.index(name)].cell_contents
        space = thing.__globals__
    else:
        space = vars(sys.modules[thing.__module__])
    if name in space:
        return True, space[name]
    if hasattr(builtins, name):
        return False, None
    raise ValueError(f"{thing.__name__!r} uses {name!r}, which is not defined there")


def _importable(value: Any) -> bool:
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":
        return False
    return getattr(module, getattr(value, "__qualname__", ""), None) is value


def _literal(value: Any) -> str | None:
    """Returns the source of a number, a string or the like, the same in every process; None for anything else."""
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or kind in (bool, int, float, str, bytes) or (kind is complex and cmath.isfinite(value)):
        return repr(value)
    if kind not in (tuple, list, set, frozenset, dict):
        return None
    entries = value.items() if kind is dict else [(item,) for item in value]
    items = [[_literal(part) for part in entry] for entry in entries]
    if any(part is None for item in items for part in item):
        return None
    texts = [": ".join(item) for item in items]
    if kind in (set, frozenset):
        return f"{kind.__name__}([{', '.join(sorted(texts))}])"
    left, right = {tuple: "()", list: "[]", dict: "{}"}[kind]
    return f"{left}{', '.join(texts)}{',' * (kind is tuple and len(texts) == 1)}{right}"
