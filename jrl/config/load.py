"""Builds the root config from gin statements. Every binding is checked, and an unused one is an error.

Later bindings override earlier ones, as in gin: included file, including file, command line. `warm/AdamW.x` overrides
`AdamW.x` in the instance `@warm/AdamW()` and in the dataclasses nested in it that no reference names.

A binding that reaches nothing is an error, with one exception: if an outer layer (an including file over an included
one, the command line over both) replaces the selection of a part, the inner layer's bindings for that part are ignored.
So `jrl train dapo.gin 'Online.objective = @GRPO()'` works, but `DAPO.clip_high` next to `@GRPO()` in the same file is
an error. A macro counts as used if any statement mentions it; one from the command line must reach a value.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jrl import paths
from jrl.config.errors import COMMAND_LINE, ConfigError, nearest
from jrl.config.names import check_names
from jrl.config.reading import Reading
from jrl.config.schema import Field, Tables, fields_of, is_config, schema_of
from jrl.config.syntax import Macro, Reference, Statement, read_statements, walk
from jrl.config.typed import Misfit, fit, show
from jrl.config.unused import check_macros, check_unused

MAX_VALUES = 100_000  # expanded values and instances; macros that each double the last one reach it in 16 lines


def load(
    path: str | None, bindings: Sequence[str], root: type, tables: Tables, path_fields: Collection[str] = ()
) -> Any:
    """Returns the instance of `root` that a gin file and command-line bindings describe.

    Args:
      path: the gin file; None: only the bindings.
      bindings: "NAME=VALUE", in gin syntax; they override the file.
      root: the root dataclass.
      tables: table name -> row name -> config class, e.g. tables["algos"]["GRPO"].
      path_fields: "Class.field" of the fields that name files. A relative path is looked up in the current directory,
        then in the folder of the gin file that binds it; see `paths.beside`.

    Raises: ConfigError for anything invalid, with its location and, if one is similar, the nearest valid name.
    """
    config, reading, statements = _read(path, bindings, root, tables, path_fields)
    check_macros(reading, statements)
    check_unused(reading, statements)
    return config


def reached(path: str | None, bindings: Sequence[str], root: type, tables: Tables) -> set[str]:
    """Returns the names of the statements that the configuration reads: "DAPO.clip_high", "LR" of a macro. The others
    may be unused. Arguments and errors otherwise as in `load`."""
    _, reading, _ = _read(path, bindings, root, tables, ())
    return {reading.bindings[key].name for key in reading.used} | reading.used_macros


def _read(
    path: str | None, bindings: Sequence[str], root: type, tables: Tables, path_fields: Collection[str]
) -> tuple[Any, Reading, list[Statement]]:
    schema = schema_of(root, tables)
    statements = read_statements(path, bindings, root)
    macro_names = {s.section for s in statements if not s.field and not s.is_block}
    for statement in statements:
        check_names(statement, schema, macro_names)
    reading = Reading(
        schema=schema,
        bindings={(s.scope, s.section, s.field): s for s in statements if s.field},
        macros={s.section: s for s in statements if not s.field and not s.is_block},
        origin=COMMAND_LINE if path is None else path,
        used=set(),
        shadowed={},
        used_macros=set(),
        instances=set(),
        work=itertools.count(),
        path_fields=frozenset(path_fields),
    )
    return _build(reading, root, "", reading.origin, None, ()), reading, statements


def peek(path: str | None, bindings: Sequence[str], root: type, field: str) -> tuple[Any, str | None]:
    """Returns the plain value bound to a field of the root, and the file that binds it (None: no file does).

    For values that are needed before the tables exist, such as `parts`. Other statements are parsed but not checked.

    Raises: ConfigError if the value contains a reference or a macro, or is not of the field's type.
    """
    last = None
    for statement in read_statements(path, bindings, root):
        if (statement.scope, statement.section, statement.field) == ("", root.__name__, field):
            last = statement
    if last is None:
        return None, None
    if any(isinstance(leaf, Reference | Macro) for leaf in walk(last.value)):
        raise ConfigError(last.location, f"{last.name} takes plain values only, no @ and no %")
    try:
        return fit(last.value, fields_of(root)[field].hint, {}, _no_instance), last.path
    except Misfit as misfit:
        raise ConfigError(last.location, f"{last.name}{misfit.inside} {misfit.reason}") from None


def _no_instance(part: Any, allowed: Mapping[str, type]) -> Any:
    raise Misfit(f"takes plain values only, got {show(part)}")


def _build(reading: Reading, cls: type, scope: str, location: str, base: Any, building: tuple[Any, ...]) -> Any:
    """Returns an instance of `cls`. A field takes its binding, else its value in `base` (a default instance), else its
    default."""
    if (scope, cls) in building:
        raise ConfigError(location, f"@{scope + '/' if scope else ''}{cls.__name__}() contains itself")
    _count(reading, location)
    building = (*building, (scope, cls))
    reading.instances.add((scope, cls.__name__))
    values, bound = {}, {}
    for field in fields_of(cls).values():
        statement = _find(reading, scope, cls, field)
        if statement is not None:
            bound[field.name] = statement
        values[field.name] = _value(reading, cls, field, scope, location, base, building, statement)
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(
            _location_of_error(reading, str(error), bound, location), f"{cls.__name__}: {error}"
        ) from error


def _find(reading: Reading, scope: str, cls: type, field: Field) -> Statement | None:
    plain, scoped = ("", cls.__name__, field.name), (scope, cls.__name__, field.name)
    if scope and scoped in reading.bindings:
        reading.used.add(scoped)
        if plain in reading.bindings:
            reading.shadowed[plain] = reading.bindings[scoped]
        return reading.bindings[scoped]
    if plain in reading.bindings:
        reading.used.add(plain)
        return reading.bindings[plain]
    return None


def _value(
    reading: Reading,
    cls: type,
    field: Field,
    scope: str,
    location: str,
    base: Any,
    building: tuple[Any, ...],
    statement: Statement | None,
) -> Any:
    name = f"{cls.__name__}.{field.name}"
    rows = reading.schema.rows(field)
    macro_note = ""
    if statement is not None:
        value, location, macro_note = _expand(reading, statement.value, statement.location, name)
        if name in reading.path_fields:
            value = _resolve_paths(value, _file_of_value(reading, statement))
    elif base is not None:
        value = getattr(base, field.name)
    elif field.default is not None:
        value = field.default()
    elif is_config(field.hint):
        return _build(reading, field.hint, scope, location, None, building)
    else:
        raise ConfigError(location, _missing(name, rows, scope, cls, reading.schema.root))

    def instance(part: Any, allowed: Mapping[str, type]) -> Any:
        if isinstance(part, Reference) and part.name in allowed:
            return _build(reading, allowed[part.name], part.scope, location, None, building)
        if type(part) in allowed.values():  # a default instance: bindings of its class apply to it
            return _build(reading, type(part), scope, location, part, building)
        listed = ", ".join(f"@{row}()" for row in allowed) or "a part, but its table is empty"
        word = part.name if isinstance(part, Reference) else part if isinstance(part, str) else ""
        guess = nearest(word, allowed)
        hint = f"; did you mean @{guess}()?" if guess else ""
        raise Misfit(f"expects {'one of ' if len(allowed) > 1 else ''}{listed}, got {show(part)}{hint}")

    try:
        return fit(value, field.hint, rows, instance)
    except Misfit as misfit:
        raise ConfigError(location, f"{name}{misfit.inside} {misfit.reason}{macro_note}") from None


def _expand(
    reading: Reading, value: Any, location: str, name: str, trail: tuple[str, ...] = ()
) -> tuple[Any, str, str]:
    """Returns the value with macros expanded, its location, and a note that names the macro ("" for other values)."""
    _count(reading, location)
    if isinstance(value, Macro):
        if value.name in trail:
            raise ConfigError(location, f"macro {value} is defined by itself: {' -> '.join((*trail, value.name))}")
        reading.used_macros.add(value.name)
        source = reading.macros[value.name]
        inner, inner_location, _ = _expand(reading, source.value, source.location, name, (*trail, value.name))
        return inner, inner_location, f" ({name} is {value} at {location})"
    if isinstance(value, dict):
        pairs = [(_expand(reading, k, location, name, trail)[0], _expand(reading, v, location, name, trail)[0])
                 for k, v in value.items()]  # fmt: skip
        if any(isinstance(key, list | dict | tuple) for key, _ in pairs):
            raise ConfigError(location, f"{name}: a list cannot be a key")
        return dict(pairs), location, ""
    if isinstance(value, list | tuple):
        return type(value)(_expand(reading, item, location, name, trail)[0] for item in value), location, ""
    return value, location, ""


def _file_of_value(reading: Reading, statement: Statement) -> str | None:
    """Returns the file that sets the value of a statement, through macros; None: the command line."""
    while isinstance(statement.value, Macro):
        statement = reading.macros[statement.value.name]
    return statement.path


def _resolve_paths(value: Any, file: str | None) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_resolve_paths(item, file) for item in value)
    return paths.beside(value, file) if isinstance(value, str) else value


def _count(reading: Reading, location: str) -> None:
    if next(reading.work) >= MAX_VALUES:
        raise ConfigError(location, f"the configuration grows beyond {MAX_VALUES} values")


def _missing(name: str, rows: Mapping[str, type], scope: str, cls: type, root: type) -> str:
    choices = ", ".join(f"@{row}()" for row in rows)
    parts = f", one of {choices}" if choices else ""
    selected = (
        "" if cls is root else f" (@{scope + '/' if scope else ''}{cls.__name__}() is part of this configuration)"
    )
    return f"{name} has no value and no default; bind {name} = ...{parts}{selected}"


def _location_of_error(reading: Reading, message: str, bound: Mapping[str, Statement], location: str) -> str:
    """Returns the location of the binding that an error message mentions, else of any of the class, else `location`."""
    for section, field in re.findall(r"(\w+)\.(\w+)", message):
        for key, statement in reading.bindings.items():
            if key[1:] == (section, field):
                return statement.location
    for word in re.findall(r"\w+", message):
        if word in bound:
            return bound[word].location
    return next((statement.location for statement in bound.values()), location)
