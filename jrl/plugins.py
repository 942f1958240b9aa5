"""User-defined parts: files or objects that add rows to the tables for one run, without changes to the package.

A parts file is a Python file that defines dicts named after the tables: ALGOS, OPTIMIZERS, STRATEGIES, CURRICULA,
SOURCES, VERIFIERS, ENVS, TOKENIZERS, MODELS. It may import its neighbors, modules of the same folder; their source is
hashed, saved and sent to the workers like the file's. From Python, `parts=[...]` also takes dicts of such tables,
{"ENVS": {...}}, and plain functions (completion, example) -> float or bool. Functions become verifiers under their
names and are sent to the verifier workers as source.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import hashlib
import inspect
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jrl import paths
from jrl.algos.contract import Objective
from jrl.algos.results import ARGUMENTS as OBJECTIVE_ARGUMENTS
from jrl.algos.results import checked, wrong_function
from jrl.config.schema import schema_of
from jrl.experiment import TABLES, Config, Tables, config_classes
from jrl.learning.optimizers.contract import Optimizer
from jrl.learning.optimizers.settings import OptimizerSettings
from jrl.models.contract import CUSTOM_MODEL_FIELDS, CustomModel
from jrl.rollout.strategies.contract import Strategy
from jrl.tasks.data.curricula import Curriculum, OutcomeMemory
from jrl.tasks.data.stored import StoredSource
from jrl.tasks.envs.contract import Environment
from jrl.tasks.tokenizers.contract import Tokenizer
from jrl.tasks.verifiers import Verifier, as_verifier
from jrl.tasks.verifiers.definitions import MISSING, literal_of, meaning_of, methods_of
from jrl.tasks.verifiers.function_source import part_of, source_lines
from jrl.tasks.verifiers.source import PartSource, load_module, read_part

NAMES = {"algos": "ALGOS", "optimizers": "OPTIMIZERS", "strategies": "STRATEGIES", "curricula": "CURRICULA",
         "sources": "SOURCES", "envs": "ENVS", "verifiers": "VERIFIERS", "tokenizers": "TOKENIZERS",
         "models": "MODELS"}  # fmt: skip
ROWS = {"algos": Objective, "optimizers": Optimizer, "strategies": Strategy, "curricula": Curriculum,
        "sources": StoredSource, "envs": Environment, "verifiers": Verifier, "tokenizers": Tokenizer,
        "models": CustomModel}  # fmt: skip
# What a config class derives from, where jrl reads fields of every row's
BASES = {"optimizers": OptimizerSettings, "curricula": OutcomeMemory}
AS_OBJECTS = "parts["  # begins the name of a part that was given as objects; after it comes its place
TRACED = ("algos", "optimizers")  # rows whose config classes are pytrees
# What the functions of rows are called with, by field
ARGUMENTS = {
    "algos": OBJECTIVE_ARGUMENTS,
    "optimizers": {"direction": ("config", "leaves"), "check": ("config", "leaves")},
    "strategies": {
        "check": ("config", "setting"),
        "check_prompts": ("config", "visits"),
        "drawing": ("config", "tokenizer"),
        "prefix": ("config", "visit", "tokenizer", "room"),
        "asked": ("config", "visit", "tokenizer", "room"),
        "roles": ("config",),
        "branches": ("config",),
    },
    "curricula": {
        "weights": ("config", "table"),
        "limit": ("config", "table", "order"),
        "after": ("config", "table"),
        "visits": ("config",),
        "pilot": ("config",),
        "window": ("config",),
    },
}

Part = str | Path | Callable[..., Any] | Mapping[str, Mapping[str, Any]]


class PartError(ValueError):
    """An invalid part. The message names it and says what would be valid."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """The tables of a run, and which of their rows are the user's."""

    tables: Tables
    sources: tuple[PartSource, ...]  # of parts with verifiers, for the worker processes
    texts: tuple[PartSource, ...]  # of every part that has a source, in order; saved in the run's folder
    hashes: dict[str, str]  # part, or neighbor of one -> sha256 of its source, for the manifest
    added: dict[str, tuple[str, ...]]  # table -> names that parts added


def load_parts(parts: Sequence[Part]) -> Parts:
    """Returns TABLES extended by `parts`. Raises PartError for a bad part or a name that is taken."""
    merged = {table: dict(rows) for table, rows in TABLES.items()}
    added: dict[str, list[str]] = {table: [] for table in merged}
    sources, texts, hashes = [], [], {}
    neighbors: dict[str, str] = {}  # name -> file
    sections = schema_of(Config, config_classes(TABLES)).sections if parts else {}
    for place, part in enumerate(parts):
        name, defined, source = _read(part, place)
        for neighbor in () if source is None else source.neighbors:
            if neighbors.setdefault(neighbor.name, neighbor.filename) != neighbor.filename:
                raise PartError(
                    f"part {name}: {neighbor.filename} and {neighbors[neighbor.name]} would be one module, "
                    f"{neighbor.name!r}; rename one of them"
                )
        for table, rows in defined.items():
            for row_name, row in rows.items():
                if row_name in merged[table]:
                    raise PartError(f"part {name}: {row_name!r} is already in {NAMES[table]}; give yours another name")
                if row_name in sections:
                    raise PartError(f"part {name}: {row_name!r} is a section of the configuration (`jrl help config "
                                    f"{row_name}`); give yours another name")  # fmt: skip
                row = _row(table, row_name, row, name)
                merged[table][row_name] = _of_this_load(row) if source is None else row
                added[table].append(row_name)
        try:
            schema_of(Config, config_classes(merged))
        except (TypeError, NameError) as error:  # of annotations, and two classes of one name, in other tables too
            raise PartError(f"part {name}: {error}") from error
        if source is not None:
            texts.append(source)
            hashes[name] = hashlib.sha256(source.source.encode()).hexdigest()
            for neighbor in source.neighbors:
                hashes[neighbor.filename] = hashlib.sha256(neighbor.source.encode()).hexdigest()
            if defined.get("verifiers"):
                sources.append(source)
        else:
            hashes[name] = _digest_of(defined)
    return Parts(merged, tuple(sources), tuple(texts), hashes, {table: tuple(names) for table, names in added.items()})


def part_files(parts: Parts) -> dict[str, str]:
    """Returns name -> text of the files that save the parts in one folder: "0.py", "1.py" and their neighbors."""
    files = {f"{place}.py": part.source for place, part in enumerate(parts.texts)}
    return files | {f"{n.name}.py": n.source for part in parts.texts for n in part.neighbors}


def saved_parts(folder: str | Path) -> list[Path]:
    """Returns the paths of the parts in a folder of `part_files`, in order."""
    names = [name for name in paths.list_dir(folder) if name.removesuffix(".py").isdecimal()]
    return [Path(folder) / name for name in sorted(names, key=lambda name: int(name.removesuffix(".py")))]


def _read(part: Part, place: int) -> tuple[str, dict[str, Mapping[str, Any]], PartSource | None]:
    if isinstance(part, str | Path):
        path = Path(part)
        if path.is_dir() or not path.exists():
            raise PartError(f"parts: there is no file {str(path)!r}; a relative path begins at the current directory "
                            "or, if a gin file names it, at the folder of that file")  # fmt: skip
        try:
            source = read_part(path)
            module = load_module(source, place)
        except SystemExit as error:
            raise PartError(
                f"part {path}: it calls sys.exit({error.code!r}) when it is imported; put that under "
                "`if __name__ == '__main__':`"
            ) from error
        except Exception as error:
            hint = "; a part is a Python file" if isinstance(error, SyntaxError) and path.suffix != ".py" else ""
            raise PartError(f"part {path}: {type(error).__name__}: {error}{hint}") from error
        return str(path), _tables_in(vars(module), str(path)), source
    if isinstance(part, Mapping):
        name = f"{AS_OBJECTS}{place}]"
        return name, _tables_in(part, name, strict=True), None
    if inspect.isfunction(part):
        return part.__name__, {"verifiers": {part.__name__: part}}, _function_source(part)
    raise PartError(
        f"parts[{place}] is of type {type(part).__name__}; a part is a path of a Python file, a function "
        "(completion, example) -> float, or a dict {'ENVS': {...}}"
    )


def _digest_of(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a hash of rows given as objects: their names, and what their functions are made of, except code of jrl
    and of installed packages. The modules of a model and the values of other objects are not in it."""
    definitions: dict[str, str] = {}
    seen: set[int] = set()
    for table, rows in tables.items():
        for name, row in rows.items():
            for field, value in row._asdict().items():
                _define(f"{NAMES[table]}[{name!r}].{field}", value, definitions, seen)
    return hashlib.sha256(json.dumps(definitions, sort_keys=True).encode()).hexdigest()


def _define(name: str, value: Any, definitions: dict[str, str], seen: set[int]) -> None:
    """Adds a plain value, or the source of a function or class, to `definitions`, and under longer names what it is
    made of and uses by name. What has no source is left out, and what was `seen` (ids) before."""
    try:
        literal = literal_of(value)
    except RecursionError:  # a collection that contains itself
        literal = None
    if literal is not None:  # the same in every process
        definitions[name] = literal
    elif id(value) not in seen:  # functions may call each other
        seen.add(id(value))
        for part, other in _used_by(value).items():
            _define(f"{name}.{part}", other, definitions, seen)
        if _is_users_own(value):
            with contextlib.suppress(OSError, TypeError, SyntaxError):
                # of a function that wraps another, its own lines
                definitions[name] = source_lines(value if isinstance(value, type) else value.__code__)


def _used_by(value: Any) -> dict[str, Any]:
    """Returns what a collection, function or class of the user's is made of and uses by name; of any other object its
    class and the functions that it holds."""
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, dict):
        return {f"{place} {literal_of(key)}": item for place, (key, item) in enumerate(value.items())}
    if isinstance(value, tuple | list):
        return {str(place): item for place, item in enumerate(value)}
    if isinstance(value, types.MethodType):
        return {"__func__": value.__func__, "__self__": value.__self__}
    if isinstance(value, types.ModuleType):
        return {}
    if not isinstance(value, type | types.FunctionType):  # an object: what it calls, as jax.custom_vjp and its rules
        calls = lambda name, item: name == "__wrapped__" or isinstance(item, types.FunctionType)
        attributes = getattr(value, "__dict__", {})
        return {name: item for name, item in attributes.items() if calls(name, item)} | {"__class__": type(value)}
    if not _is_users_own(value):
        return {}
    if isinstance(value, type):
        return {method.__name__: method for method in methods_of(value)} | {"__bases__": value.__bases__}
    names = (*value.__code__.co_freevars, *_names_in(value.__code__))
    used = {name: meaning for name in names if (meaning := _meaning_of(value, name)) is not MISSING}
    return used | {"__defaults__": value.__defaults__, "__kwdefaults__": value.__kwdefaults__}


def _meaning_of(function: types.FunctionType, path: str) -> Any:
    """Returns the value of a name, or of an attribute of a module of the user's ("module.name"); else MISSING."""
    name, *attributes = path.split(".")
    value = meaning_of(function, name)
    for attribute in attributes:
        value = getattr(value, attribute, MISSING) if _is_users_own(value, types.ModuleType) else MISSING
    return value


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yields the names that a function reads from outside of it and what it reads of them ("module", "module.name"),
    also in functions and classes inside of it."""
    path = ""
    for each in dis.get_instructions(code):
        if each.opname == "EXTENDED_ARG":  # it belongs to the next instruction
            continue
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            path = each.argval
        elif path and each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path = f"{path}.{each.argval}"
        else:
            path = ""
            continue
        yield path
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_in(inner)


def _is_users_own(value: Any, kinds: Any = type | types.FunctionType) -> bool:
    """Whether a function or class, or what else `kinds` allows, is neither jrl's nor an installed package's or Python's
    own."""
    if not isinstance(value, kinds):
        return False
    module = str(value.__name__ if isinstance(value, types.ModuleType) else value.__module__)
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    installed = {"site-packages", "dist-packages"} & {*Path(file).parts}
    return not installed and module.partition(".")[0] not in ("jrl", *sys.stdlib_module_names)


def _tables_in(names: Mapping[str, Any], where: str, strict: bool = False) -> dict[str, Mapping[str, Any]]:
    tables = {table: names[name] for table, name in NAMES.items() if name in names}
    unknown = [name for name in names if name not in NAMES.values()] if strict else []
    if unknown or not tables:
        raise PartError(
            f"part {where} defines none of {', '.join(NAMES.values())}" + (f": {unknown}" if unknown else "")
        )
    for table, rows in tables.items():
        if not isinstance(rows, Mapping):
            raise PartError(
                f"part {where}: {NAMES[table]} is of type {type(rows).__name__}; it must be a dict: name -> row"
            )
    if strict and "verifiers" in tables:
        raise PartError(
            f"part {where}: verifiers run in other processes and are sent as source; pass a function or a file"
        )
    return tables


def _row(table: str, name: str, row: Any, where: str) -> Any:
    if table == "verifiers":
        try:
            row = as_verifier(name, row)
        except ValueError as error:
            raise PartError(f"part {where}: {error}") from error
    if not isinstance(row, ROWS[table]):
        raise PartError(
            f"part {where}: {NAMES[table]}[{name!r}] must be of type {ROWS[table].__name__}, not {type(row).__name__}"
        )
    is_class = isinstance(row.config, type)
    is_dataclass = is_class and "__dataclass_fields__" in vars(row.config)  # itself: what it adds would be no fields
    if (base := BASES.get(table)) is not None and not (is_class and issubclass(row.config, base)):
        raise PartError(f"part {where}: the config class of {NAMES[table]}[{name!r}] must derive from {base.__name__} "
                        f"({base.__module__})")  # fmt: skip
    if table in TRACED and not (is_dataclass and not jax.tree_util.all_leaves([object.__new__(row.config)])):
        raise PartError(f"part {where}: the config class of {NAMES[table]}[{name!r}] is not a pytree; decorate it with "
                        "@traced (jrl.types)")  # fmt: skip
    if not is_dataclass or not row.config.__dataclass_params__.frozen:
        raise PartError(f"part {where}: the config class of {NAMES[table]}[{name!r}] is not a frozen dataclass; "
                        "decorate it with @dataclasses.dataclass(frozen=True)")  # fmt: skip
    if row.config.__name__ != name:
        raise PartError(f"part {where}: {NAMES[table]}[{name!r}] must have the name of its config class, "
                        f"{row.config.__name__!r}: gin text refers to it by that name")  # fmt: skip
    if table == "verifiers" and "weight" not in {field.name for field in dataclasses.fields(row.config)}:
        raise PartError(f"part {where}: the config class of VERIFIERS[{name!r}] has no field `weight`, the weight "
                        "of this verifier in the reward; add `weight: float = 1.0`")  # fmt: skip
    if table == "models" and (
        missing := set(CUSTOM_MODEL_FIELDS) - {field.name for field in dataclasses.fields(row.config)}
    ):
        raise PartError(f"part {where}: the configuration of MODELS[{name!r}] has no {', '.join(sorted(missing))}")
    if table in ARGUMENTS and (problem := wrong_function(row, ARGUMENTS[table])) is not None:
        raise PartError(f"part {where}: {NAMES[table]}[{name!r}].{problem}")
    return checked(row) if table == "algos" else row


class _LoadedDrawing(NamedTuple):
    """What a strategy draws with, equal only to one of the same load."""

    drawing: Any
    load: object

    roles = property(lambda self: self.drawing.roles)

    def __call__(self, shard: Any) -> Any:
        return self.drawing(shard)


def _of_this_load(row: Any) -> Any:
    """Returns a row given as an object with functions that are new objects, so that no program is shared with an
    earlier load: a variable or a function that they use by name may have changed since. A parts file is run anew."""
    load = object()

    def anew(value: Any) -> Any:
        if isinstance(value, tuple) and hasattr(value, "_fields"):  # the functions of a model
            return type(value)(*map(anew, value))
        if not callable(value) or isinstance(value, type):
            return value
        return functools.wraps(value)(lambda *args, **kwargs: value(*args, **kwargs))

    if isinstance(row, Strategy) and row.drawing is not None:
        drawing = row.drawing
        row = row._replace(drawing=lambda config, tokenizer: _LoadedDrawing(drawing(config, tokenizer), load))
    return anew(row)


def _function_source(function: Callable[..., Any]) -> PartSource:
    try:
        return part_of({function.__name__: function})
    except ValueError as error:
        raise PartError(f"part {function.__name__!r}: {error}") from error
