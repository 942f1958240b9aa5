"""The configurable classes, reachable from the root and the tables, and the fields of each."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Union

Tables = Mapping[str, Mapping[str, type]]


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a config class, with its annotation resolved."""

    name: str
    hint: Any
    table: str | None  # the table whose rows `Any` in the hint stands for
    default: Callable[[], Any] | None  # None: the field is required


@dataclasses.dataclass(frozen=True)
class Schema:
    root: type
    tables: Tables
    sections: Mapping[str, type]  # every class that a binding can name, by that name

    def rows(self, field: Field) -> Mapping[str, type]:
        """Returns the rows that `Any` in the field's hint can stand for; empty for a field without a table."""
        return {} if field.table is None else self.tables[field.table]


def schema_of(root: type, tables: Tables) -> Schema:
    """Returns the schema of a root dataclass and its tables (table name -> row name -> config class).

    Raises: TypeError for a mistake of a developer: an unknown table, a row that is not named like its class, two
    classes with one name, an unsupported annotation.
    """
    sections: dict[str, type] = {}
    waiting = [root]
    for table, rows in tables.items():
        for name, cls in rows.items():
            if cls.__name__ != name:
                raise TypeError(f"table {table!r}: row {name!r} must be named like its config class {cls.__name__!r}")
            waiting.append(cls)
    while waiting:
        cls = waiting.pop(0)
        if sections.setdefault(cls.__name__, cls) is not cls:
            raise TypeError(f"two config classes are named {cls.__name__!r}: bindings could not tell them apart")
        for field in fields_of(cls).values():
            if field.table is not None and field.table not in tables:
                raise TypeError(f"{cls.__name__}.{field.name} refers to the table {field.table!r}, which is not given")
        waiting.extend(c for c in classes_below(cls) if sections.get(c.__name__) is not c and c not in waiting)
    return Schema(root, tables, sections)


@functools.cache
def classes_below(cls: type) -> tuple[type, ...]:
    """Returns the dataclasses in the annotations and the defaults of a class's fields, each once.

    Raises: TypeError for an unsupported annotation.
    """
    classes: list[type] = []
    for field in fields_of(cls).values():
        check_hint(field.hint, field.table, f"{cls.__name__}.{field.name}")
        classes += [*classes_in(field.hint), *_classes_of_values(field.default() if field.default else None)]
    return tuple(dict.fromkeys(classes))


@functools.cache
def fields_of(cls: type) -> dict[str, Field]:
    """Returns field name -> Field for the fields that a binding can set, in order."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass, so it cannot be configured")
    hints = typing.get_type_hints(cls)
    return {
        field.name: Field(field.name, hints[field.name], field.metadata.get("table"), _default(field))
        for field in dataclasses.fields(cls)
        if field.init
    }


def all_fields(root: type, tables: Tables) -> list[tuple[type, str]]:
    """Returns every (class, field name) that a configuration can reach, each once."""
    sections = schema_of(root, tables).sections
    return [(cls, name) for cls in sections.values() for name in fields_of(cls)]


def options_of(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union; for another hint, that hint alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_config(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def classes_in(hint: Any) -> Iterator[type]:
    """Yields the dataclasses that a hint mentions, at any depth."""
    if is_config(hint):
        yield hint
    elif typing.get_origin(hint) is not Literal:
        for part in typing.get_args(hint):
            yield from classes_in(part)


def check_hint(hint: Any, table: str | None, where: str) -> None:
    """Raises TypeError for an annotation that values cannot be checked against."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint in (int, float, str, bool, type(None)) or is_config(hint) or origin is Literal:
        return
    if hint is Any and table is not None:
        return
    if origin in (Union, types.UnionType) or origin is tuple:
        for part in parts:
            if part is not Ellipsis:
                check_hint(part, table, where)
        return
    if origin is dict and parts[0] is str:
        check_hint(parts[1], table, where)
        return
    raise TypeError(f"{where}: the annotation {hint} is not supported in a configuration")


def _default(field: dataclasses.Field) -> Callable[[], Any] | None:
    if field.default is not dataclasses.MISSING:
        value = field.default
        return lambda: value
    return None if field.default_factory is dataclasses.MISSING else field.default_factory


def _classes_of_values(value: Any) -> Iterator[type]:
    if is_config(type(value)):
        yield type(value)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _classes_of_values(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _classes_of_values(item)
