"""A user's verifiers as source text, in which form they are sent to the template.

A parts file may import its neighbors, which are modules of the same folder. Their source is sent with it.
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

PART_MODULE = "jrl_part_"  # followed by its index: the name of a part's module
NEIGHBOR = "__jrl_neighbor__"  # attribute of a neighbor's module: the Neighbor that it was loaded from


class Neighbor(NamedTuple):
    """A module in the folder of a parts file that the file or another neighbor imports."""

    name: str  # of the module
    filename: str
    source: str


@dataclasses.dataclass(frozen=True)
class PartSource:
    """The text of one parts file, and the name its tracebacks show."""

    filename: str
    source: str
    neighbors: tuple[Neighbor, ...] = ()  # each after the neighbors that it imports

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> PartSource:
        return PartSource(fields["filename"], fields["source"], tuple(Neighbor(*n) for n in fields["neighbors"]))


def read_part(path: Path) -> PartSource:
    """Returns a parts file with the neighbors that it imports, without running them.

    Imports inside functions count. A name of the standard library is never a neighbor.

    Raises: OSError and UnicodeDecodeError if a file cannot be read; SyntaxError naming the file; ValueError for a pipe,
        a socket or a device, and for neighbors that import each other.
    """
    from jrl import paths  # imports HTTP and numpy for buckets, which verifier processes do not need

    neighbors: dict[str, Neighbor] = {}

    def add_neighbors(filename: str, source: str, importing: tuple[str, ...]) -> None:
        for name in _imported_names(ast.parse(source, filename)):
            file = path.parent / f"{name}.py"
            if name in importing:
                raise ValueError(f"{filename} and {file} import each other; move what both need into a third file")
            if name in neighbors or name in sys.stdlib_module_names or not file.is_file():
                continue
            neighbor = Neighbor(name, str(file), source_text(file))
            add_neighbors(neighbor.filename, neighbor.source, (*importing, name))
            neighbors[name] = neighbor

    paths.check_not_special(path)
    source = source_text(path)
    add_neighbors(str(path), source, (path.stem,))
    return PartSource(str(path), source, tuple(neighbors.values()))


def source_text(path: Path) -> str:
    """Returns the text of a Python file, which is UTF-8, without the byte order mark that some editors write."""
    return path.read_text(encoding="utf-8-sig")


def _imported_names(tree: ast.Module) -> Iterator[str]:
    """Yields the top-level names of the modules that a file imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def load_module(part: PartSource, index: int) -> types.ModuleType:
    """Returns the module of a part, after loading its neighbors, which it and later code can import.

    Raises: ValueError if a neighbor has the name of another loaded module; any exception that the part raises while it
        runs.
    """
    _load_neighbors(part)
    return _execute(f"{PART_MODULE}{index}", part.filename, part.source)


def _load_neighbors(part: PartSource) -> None:
    """Runs the neighbors of a part, unless exactly these are loaded already."""
    ours = [neighbor for neighbor in part.neighbors if not _is_imported(neighbor)]
    if all(getattr(sys.modules.get(n.name), NEIGHBOR, None) == n for n in ours):
        return
    for neighbor in ours:
        setattr(_execute(*neighbor), NEIGHBOR, neighbor)


def is_of_part(module_globals: Mapping[str, Any]) -> bool:
    """Returns whether these are the globals of a part's module, or of a neighbor's."""
    return NEIGHBOR in module_globals or module_globals.get("__name__", "").startswith(PART_MODULE)


def _is_imported(neighbor: Neighbor) -> bool:
    """Returns whether the user's program has imported this file. Raises ValueError if another module has its name."""
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

    This is the only place in jrl that runs text as code. The text is the user's file, named on the command line or
    passed by the notebook, never text from a model or a data set.
    """
    module = types.ModuleType(name)
    module.__file__ = filename
    sys.modules[name] = module  # dataclasses resolve their annotations there
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec", dont_inherit=True), module.__dict__)  # without this file's __future__ flags
    return module


def load_part(part: PartSource, index: int) -> Mapping[str, Any]:
    """Returns the VERIFIERS dict that a part defines; {} if it defines none.

    Raises:
        ValueError: the part's VERIFIERS is not a dict.
        Any exception that the part raises while it runs.
    """
    verifiers = vars(load_module(part, index)).get("VERIFIERS", {})
    if not isinstance(verifiers, Mapping):
        raise ValueError(
            f"{part.filename}: VERIFIERS has type {type(verifiers).__name__}; it must be a dict: name -> row"
        )
    return verifiers
