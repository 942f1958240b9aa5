"""The settings of a run: the fields of its config.gin that can matter. Runs with equal settings are one experiment."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jrl import config as gin
from jrl.config.dump import scoped_names
from jrl.config.errors import ConfigError
from jrl.config.sweep import gin_text
from jrl.config.syntax import Reference, Statement, read_statements
from jrl.experiment import FREE, ROUNDED, Config, Offline

SEED = "Run.seed"  # runs that differ only in it are one variant
DATA_FILES = ("Dataset.path", "Jsonl.path")  # settings if the files have other contents; one may have been moved
# Fields in which two runs of the same experiment may differ. Meshes and kernels are not among them: they change speed.
IRRELEVANT = tuple(name for name in FREE if name not in (*ROUNDED, "MeshShape.*", *DATA_FILES))


def settings_of(statements: Iterable[Statement]) -> tuple[str, dict[str, str]]:
    """Returns (seed, settings), such as {"AdamW.learning_rate": "0.001"}, without the irrelevant fields."""
    bound = {name: gin_text(value) for name, value in by_place(statements)}
    return bound.get(SEED, ""), {name: value for name, value in bound.items() if not is_irrelevant(name)}


def by_place(statements: Iterable[Statement]) -> Iterator[tuple[str, Any]]:
    """Yields the name and value of every field. A part has a separate name for each field that holds it.

    A config.gin writes equal parts once. So one run of a sweep may share a part between two fields where another has a
    part for each. With a name per field the runs differ only in what was swept. The first field's part has the plain
    name; those of Offline stages come last, so that a learning rate of RL has one name with and without a stage before.
    """
    sections: dict[str, list[tuple[str, Any]]] = {}
    for statement in statements:
        if not statement.is_block:
            section, _, field = statement.name.rpartition(".")
            sections.setdefault(section, []).append((field, statement.value))
    root = Config.__name__
    waiting, used, reached = [(root, root)], {root}, set()

    def renamed(value: Any, hint: str) -> Any:
        if isinstance(value, Reference):
            name = next(name for name in scoped_names(value.name, hint) if name not in used)
            used.add(name)
            waiting.append((str(value).strip("@()"), name))
            return Reference("", value.name, value.called)  # the names of its fields say which field holds it
        if isinstance(value, list | tuple):
            return type(value)(renamed(item, hint) for item in value)
        return {key: renamed(item, hint) for key, item in value.items()} if isinstance(value, dict) else value

    for section, name in waiting:  # breadth first, as config.gin is written
        reached.add(section)
        yield from ((f"{name}.{field}", renamed(value, field)) for field, value in sections.get(section, ()))
        if section == root:
            waiting[1:] = sorted(waiting[1:], key=lambda place: place[1].rpartition("/")[2] == Offline.__name__)
    for section in [section for section in sections if section not in reached]:
        yield from ((f"{section}.{field}", value) for field, value in sections[section])


def settings_of_config(config: Config, tables: Any) -> tuple[str, dict[str, str]]:
    """Returns `settings_of` the config.gin that a configuration will write."""
    lines = [line for line in gin.to_gin(config, tables).splitlines() if line]
    return settings_of(read_statements(None, lines, Config))


def settings_of_run(folder: Path) -> tuple[str, dict[str, str]]:
    """Returns `settings_of` the config.gin of a run: a line for every field, of which runs have most in common, so that
    they are parsed once. Raises: ConfigError naming the file if it is missing or damaged."""
    path = folder / "config.gin"
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line]
        return settings_of(read_statements(None, lines, Config))
    except (ConfigError, OSError, UnicodeDecodeError):
        return settings_of(read_statements(str(path), (), Config))


@functools.cache
def is_irrelevant(name: str) -> bool:
    """Returns whether runs that differ in this field can be the same experiment: the seed, or one of IRRELEVANT."""
    field = name.rpartition("/")[2]
    return field == SEED or any(fnmatch.fnmatchcase(field, pattern) for pattern in IRRELEVANT)


def is_data_file(name: str) -> bool:
    """Returns whether a field of any scope is one of DATA_FILES."""
    return name.rpartition("/")[2] in DATA_FILES
