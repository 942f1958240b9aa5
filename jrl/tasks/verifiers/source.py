"""A user's verifiers as source text: how they reach the template, whichever way the run was started.

A parts file may import its neighbors: modules of the same folder. Their text travels with it.
"""

from __future__ import annotations

import ast
import dataclasses
import linecache
import sys
import types
from collections.abc import Iterator, Mapping
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
    exec(compile(source, filename, "exec", dont_inherit=True), module.__dict__)  # nor this file's __future__
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
