"""What makes two runs one experiment: their settings, which are the fields of config.gin that can matter."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from typing import Any

from jrl import config as gin
from jrl.config.dump import scoped_names
from jrl.config.sweep import gin_text
from jrl.config.syntax import Reference, Statement, read_statements
from jrl.experiment import FREE, ROUNDED, Config

SEED = "Run.seed"  # runs that differ in it alone are one variant
# Fields in which two runs may differ and still be the same experiment. A mesh and a kernel are experiments: they have
# a speed.
IRRELEVANT = tuple(name for name in FREE if name not in (*ROUNDED, "MeshShape.*"))


def settings_of(statements: Iterable[Statement]) -> tuple[str, dict[str, str]]:
    """Returns the seed, and "AdamW.learning_rate" -> "0.001" for every field that makes another experiment of a run."""
    bound = {name: gin_text(value) for name, value in by_place(statements)}
    return bound.get(SEED, ""), {name: value for name, value in bound.items() if not is_irrelevant(name)}


def by_place(statements: Iterable[Statement]) -> Iterator[tuple[str, Any]]:
    """Yields the name and the value of every field, parts under a name for each place that holds one.

    A config.gin names equal parts once. Two runs of one sweep may so have a part of two places in the one, and a part
    for each in the other; by place they differ in what was swept alone. The first place has the plain name.
    """
    sections: dict[str, list[tuple[str, Any]]] = {}
    for statement in statements:
        if not statement.is_block:
            section, _, field = statement.name.rpartition(".")
            sections.setdefault(section, []).append((field, statement.value))
    root = Config.__name__
    waiting, taken, reached = [(root, root)], {root}, set()

    def renamed(value: Any, hint: str) -> Any:
        if isinstance(value, Reference):
            name = next(name for name in scoped_names(value.name, hint) if name not in taken)
            taken.add(name)
            waiting.append((str(value).strip("@()"), name))
            return Reference("", value.name, value.called)  # its fields say which place they are of
        if isinstance(value, list | tuple):
            return type(value)(renamed(item, hint) for item in value)
        return {key: renamed(item, hint) for key, item in value.items()} if isinstance(value, dict) else value

    for section, name in waiting:  # breadth first, as config.gin is written
        reached.add(section)
        yield from ((f"{name}.{field}", renamed(value, field)) for field, value in sections.get(section, ()))
    for section in [section for section in sections if section not in reached]:
        yield from ((f"{section}.{field}", value) for field, value in sections[section])


def settings_of_config(config: Config, tables: Any) -> tuple[str, dict[str, str]]:
    """Returns the same of a configuration that has not run: what its config.gin will say."""
    lines = [line for line in gin.to_gin(config, tables).splitlines() if line]
    return settings_of(read_statements(None, lines, Config))


def is_irrelevant(name: str) -> bool:
    """Returns whether two runs that differ in a field are still one experiment, up to their seeds."""
    field = name.rpartition("/")[2]
    return field == SEED or any(fnmatch.fnmatchcase(field, pattern) for pattern in IRRELEVANT)
