"""Statements -> one frozen root instance. Every binding is checked, and every binding must matter.

Later replaces earlier, as in gin: included file, including file, command line. `warm/AdamW.x` goes above `AdamW.x` for
the instance `@warm/AdamW()` and for the dataclasses nested in it that no reference names.

A binding that reaches nothing is an error, with one exception: where an outer layer (an including file over an
included one, the command line over both) replaced the selection of a part, the inner layer's bindings for that part
are left aside. So `jrl train dapo.gin 'Config.algo = @GRPO()'` works, and `DAPO.clip_high` beside `@GRPO()` in one file
does not. A macro counts as used where any statement mentions it; one from the command line must reach a value.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jrl.config.errors import COMMAND_LINE, ConfigError, nearest, suggestion
from jrl.config.schema import Field, Schema, Tables, classes_in, fields_of, is_config, schema_of
from jrl.config.syntax import Macro, Reference, Statement, read_statements, walk
from jrl.config.typed import Misfit, fit, show

Key = tuple[str, str, str]  # scope, section, field

MOST_WORK = 100_000  # values and instances; macros that double one another reach it in 16 lines


@dataclasses.dataclass(frozen=True)
class _Reading:
    """What one load works on. The sets, and `shadowed`, collect what was reached; the rest is not changed."""

    schema: Schema
    bindings: Mapping[Key, Statement]
    macros: Mapping[str, Statement]
    origin: str  # the place to name where no statement can be
    used: set[Key]
    shadowed: dict[Key, Statement]  # unscoped binding -> the scoped one that replaced it
    used_macros: set[str]
    instances: set[tuple[str, str]]  # (scope, section) of everything built
    work: Iterator[int]  # counts what is expanded and built


def load(path: str | None, bindings: Sequence[str], root: type, tables: Tables) -> Any:
    """Returns the instance of `root` that a gin file and command-line bindings describe.

    Args:
      path: the gin file, or None for bindings alone.
      bindings: `NAME=VALUE` each, in gin syntax; they replace what the file says.
      root: the root dataclass.
      tables: table name -> row name -> config class, e.g. tables["algos"]["GRPO"].

    Raises ConfigError with the place and the nearest valid name on anything that is not exactly right.
    """
    schema = schema_of(root, tables)
    statements = [_rooted(statement, root) for statement in read_statements(path, bindings)]
    macro_names = {s.section for s in statements if not s.field and not s.is_block}
    for statement in statements:
        _check_names(statement, schema, macro_names)
    reading = _Reading(
        schema=schema,
        bindings={(s.scope, s.section, s.field): s for s in statements if s.field},
        macros={s.section: s for s in statements if not s.field and not s.is_block},
        origin=COMMAND_LINE if path is None else path,
        used=set(),
        shadowed={},
        used_macros=set(),
        instances=set(),
        work=itertools.count(),
    )
    config = _build(reading, root, "", reading.origin, None, ())
    _check_macros(reading, statements)
    _check_unused(reading, statements)
    return config


def peek(path: str | None, bindings: Sequence[str], name: str) -> tuple[Any, str | None]:
    """Returns the plain value bound to `name` and the file that binds it (None: the command line, or nothing does).

    For what must be known before the tables are, such as `parts`: nothing else in the text is checked.
    """
    found = None
    for statement in read_statements(path, bindings):
        if statement.name == name and not statement.is_block:
            found = statement
    if found is None:
        return None, None
    if any(isinstance(leaf, Reference | Macro) for leaf in walk(found.value)):
        raise ConfigError(found.place, f"{name} takes plain values only, no @ and no %")
    return found.value, found.path


def _rooted(statement: Statement, root: type) -> Statement:
    """A name without a section that is a field of the root binds that field: `parts = [...]`."""
    if statement.field or statement.is_block or statement.scope or statement.section not in fields_of(root):
        return statement
    return dataclasses.replace(statement, section=root.__name__, field=statement.section)


def _check_names(statement: Statement, schema: Schema, macros: set[str]) -> None:
    """Raises ConfigError where a statement uses a name that does not exist, whether or not it is replaced later."""
    _check_target(statement, schema)
    for leaf in walk(statement.value):
        if isinstance(leaf, Reference):
            if leaf.name not in schema.sections:
                hint = suggestion(leaf.name, schema.sections, kind="sections")
                raise ConfigError(statement.place, f"{statement.name}: there is no {leaf.name} to refer to{hint}")
            if "/" in leaf.scope or "." in leaf.scope:
                raise ConfigError(statement.place, f"{leaf}: a scope has one level, @scope/{leaf.name}()")
            if not leaf.called:
                raise ConfigError(statement.place, f"{leaf} must be written {leaf}(): only built parts are values")
        elif isinstance(leaf, Macro) and leaf.name not in macros:
            hint = suggestion(leaf.name, macros, kind="macros")
            raise ConfigError(statement.place, f"{statement.name}: macro {leaf} is not defined{hint}")


def _check_target(statement: Statement, schema: Schema) -> None:
    section, field, place = statement.section, statement.field, statement.place
    if not field and not statement.is_block:
        if statement.scope:
            raise ConfigError(place, f"{statement.name}: a macro takes no scope")
        if section in schema.sections:
            raise ConfigError(place, f"{section} is a section; bind one of its fields, {section}.field = value")
        return
    if section not in schema.sections:
        full = f"{section}.{field}"
        keys = [f"{name}.{f}" for name, cls in schema.sections.items() for f in fields_of(cls)]
        guess = nearest(section, schema.sections) if statement.is_block else nearest(full, keys)
        hint = f"; did you mean {guess}?" if guess else suggestion(section, schema.sections, kind="sections")
        raise ConfigError(place, f"there is no section {section!r}{hint}")
    if statement.is_block:
        return
    fields = fields_of(schema.sections[section])
    if field not in fields:
        hint = suggestion(field, fields, kind=f"fields of {section}")
        elsewhere = [f"{name}.{field}" for name, cls in schema.sections.items() if field in fields_of(cls)]
        if elsewhere and nearest(field, fields) is None:
            hint = f"; did you mean {elsewhere[0]}?"
        raise ConfigError(place, f"{section} has no field {field!r}{hint}")


def _build(reading: _Reading, cls: type, scope: str, place: str, base: Any, building: tuple[Any, ...]) -> Any:
    """Returns an instance of `cls`: its bindings, else the values of `base` (a default instance), else its defaults."""
    if (scope, cls) in building:
        raise ConfigError(place, f"@{scope + '/' if scope else ''}{cls.__name__}() contains itself")
    _count(reading, place)
    building = (*building, (scope, cls))
    reading.instances.add((scope, cls.__name__))
    values, bound = {}, {}
    for field in fields_of(cls).values():
        statement = _find(reading, scope, cls, field)
        if statement is not None:
            bound[field.name] = statement
        values[field.name] = _value(reading, cls, field, scope, place, base, building, statement)
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(_most_relevant(reading, str(error), bound, place), f"{cls.__name__}: {error}") from error


def _find(reading: _Reading, scope: str, cls: type, field: Field) -> Statement | None:
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
    reading: _Reading,
    cls: type,
    field: Field,
    scope: str,
    place: str,
    base: Any,
    building: tuple[Any, ...],
    statement: Statement | None,
) -> Any:
    name = f"{cls.__name__}.{field.name}"
    rows = reading.schema.rows(field)
    because = ""
    if statement is not None:
        value, place, because = _expand(reading, statement.value, statement.place, name)
    elif base is not None:
        value = getattr(base, field.name)
    elif field.default is not None:
        value = field.default()
    elif is_config(field.hint):
        return _build(reading, field.hint, scope, place, None, building)
    else:
        raise ConfigError(place, _missing(name, field, rows, scope, cls, reading.schema.root))

    def instance(part: Any, allowed: Mapping[str, type]) -> Any:
        if isinstance(part, Reference) and part.name in allowed:
            return _build(reading, allowed[part.name], part.scope, place, None, building)
        if type(part) in allowed.values():  # a default that is an instance: bindings of its class apply to it
            return _build(reading, type(part), scope, place, part, building)
        listed = ", ".join(f"@{row}()" for row in allowed) or "a part, but its table is empty"
        word = part.name if isinstance(part, Reference) else part if isinstance(part, str) else ""
        guess = nearest(word, allowed)
        hint = f"; did you mean @{guess}()?" if guess else ""
        raise Misfit(f"expects {'one of ' if len(allowed) > 1 else ''}{listed}, got {show(part)}{hint}")

    try:
        return fit(value, field.hint, rows, instance)
    except Misfit as misfit:
        raise ConfigError(place, f"{name}{misfit.inside} {misfit.reason}{because}") from None


def _expand(reading: _Reading, value: Any, place: str, name: str, trail: tuple[str, ...] = ()) -> tuple[Any, str, str]:
    """Returns the value with macros replaced, the place where it stands, and how it came there."""
    _count(reading, place)
    if isinstance(value, Macro):
        if value.name in trail:
            raise ConfigError(place, f"macro {value} is defined by itself: {' -> '.join((*trail, value.name))}")
        reading.used_macros.add(value.name)
        source = reading.macros[value.name]
        inner, inner_place, _ = _expand(reading, source.value, source.place, name, (*trail, value.name))
        return inner, inner_place, f" ({name} is {value} at {place})"
    if isinstance(value, dict):
        pairs = [(_expand(reading, k, place, name, trail)[0], _expand(reading, v, place, name, trail)[0])
                 for k, v in value.items()]  # fmt: skip
        if any(isinstance(key, list | dict | tuple) for key, _ in pairs):
            raise ConfigError(place, f"{name}: a list cannot be a key")
        return dict(pairs), place, ""
    if isinstance(value, list | tuple):
        return type(value)(_expand(reading, item, place, name, trail)[0] for item in value), place, ""
    return value, place, ""


def _count(reading: _Reading, place: str) -> None:
    if next(reading.work) >= MOST_WORK:
        raise ConfigError(place, f"the configuration grows beyond {MOST_WORK} values")


def _missing(name: str, field: Field, rows: Mapping[str, type], scope: str, cls: type, root: type) -> str:
    choices = ", ".join(f"@{row}()" for row in rows)
    parts = f", one of {choices}" if choices else ""
    selected = (
        "" if cls is root else f" (@{scope + '/' if scope else ''}{cls.__name__}() is part of this configuration)"
    )
    return f"{name} has no value and no default; bind {name} = ...{parts}{selected}"


def _most_relevant(reading: _Reading, message: str, bound: Mapping[str, Statement], place: str) -> str:
    """Returns the place of the binding that a failed check speaks about, else of any of the class, else `place`."""
    for section, field in re.findall(r"(\w+)\.(\w+)", message):
        for key, statement in reading.bindings.items():
            if key[1:] == (section, field):
                return statement.place
    for word in re.findall(r"\w+", message):
        if word in bound:
            return bound[word].place
    return next((statement.place for statement in bound.values()), place)


def _check_macros(reading: _Reading, statements: Sequence[Statement]) -> None:
    mentioned = {leaf.name for s in statements for leaf in walk(s.value) if isinstance(leaf, Macro)}
    for name, statement in reading.macros.items():
        reached = reading.used_macros if statement.layer == 0 else mentioned
        if name in reached:
            continue
        keys = [f"{section}.{field}" for section, cls in reading.schema.sections.items() for field in fields_of(cls)]
        others = {*mentioned} - {name}
        guess = nearest(name, others) or nearest(name, fields_of(reading.schema.root)) or nearest(name, keys)
        hint = f"; did you mean {guess}?" if guess else f"; nothing says %{name}"
        if name in mentioned:
            hint = f"; every binding that says %{name} is replaced or left aside"
        raise ConfigError(statement.place, f"macro {name} is never used{hint}")


def _check_unused(reading: _Reading, statements: Sequence[Statement]) -> None:
    replaced = list(_replaced_selections(reading, statements))
    for key, statement in reading.bindings.items():
        if key in reading.used:
            continue
        if any(statement.layer > outer and (key[1] in sections) for outer, sections in replaced):
            continue
        if key in reading.shadowed:
            scoped = reading.shadowed[key]
            if scoped.layer < statement.layer:
                continue
            raise ConfigError(
                statement.place, f"unused binding: {statement.name}: {scoped.name} at {scoped.place} wins"
            )
        raise ConfigError(statement.place, _unused(reading, statement))


def _replaced_selections(reading: _Reading, statements: Sequence[Statement]) -> Iterator[tuple[int, set[str]]]:
    """Yields (layer that replaced, sections that the replaced value or default would have brought in)."""
    for statement in statements:
        if statement.field:
            winner = reading.bindings[statement.scope, statement.section, statement.field]
            field = fields_of(reading.schema.sections[statement.section])[statement.field]
            if winner is statement:
                yield statement.layer, _brought_in(reading.schema, statements, _default_parts(field))
        else:
            winner = reading.macros.get(statement.section)
        if winner is not None and winner.layer < statement.layer:
            yield winner.layer, _brought_in(reading.schema, statements, walk(statement.value))


def _default_parts(field: Field) -> Iterator[Reference]:
    classes = [type(leaf) for leaf in walk(field.default())] if field.default else [field.hint]
    return (Reference("", cls.__name__, True) for cls in classes if is_config(cls))


def _brought_in(schema: Schema, statements: Sequence[Statement], leaves: Iterable[Any]) -> set[str]:
    """Returns the sections that parsed values refer to, directly, through macros and through other bindings."""
    sections: set[str] = set()
    macros: set[str] = set()
    waiting = list(leaves)
    while waiting:
        leaf = waiting.pop()
        if isinstance(leaf, Macro) and leaf.name not in macros:
            macros.add(leaf.name)
            waiting.extend(walk([s.value for s in statements if s.section == leaf.name and not s.field]))
        elif isinstance(leaf, Reference) and leaf.name not in sections:
            sections.add(leaf.name)
            for field in fields_of(schema.sections[leaf.name]).values():
                waiting.extend(_default_parts(field))
            waiting.extend(walk([s.value for s in statements if s.section == leaf.name]))
    return sections


def _unused(reading: _Reading, statement: Statement) -> str:
    section, field = statement.section, statement.field
    text = f"unused binding: {statement.name}"
    scopes = sorted(scope for scope, name in reading.instances if name == section)
    if scopes:
        named = [scope for scope in scopes if scope]
        guess = nearest(statement.scope, named)
        hint = (
            f"; did you mean {guess}/{section}.{field}?"
            if guess
            else f"; refer to it as @{statement.scope}/{section}()"
        )
        return f"{text}: there is no @{statement.scope}/{section}() in this configuration{hint}"
    same_field = [name for _, name in reading.instances if field in fields_of(reading.schema.sections[name])]
    siblings = [name for name in same_field if _share_table(reading.schema, name, section)]
    guess = siblings[0] if siblings else nearest(section, same_field)
    hint = f"; did you mean {guess}.{field}?" if guess else ""
    holders = [
        f"{name}.{f.name}"
        for name, cls in reading.schema.sections.items()
        for f in fields_of(cls).values()
        if section in {c.__name__ for c in _choices(reading.schema, f)} and any(name == n for _, n in reading.instances)
    ]
    chosen = f"; it would need {holders[0]} = @{section}()" if holders else ""
    return f"{text}: no {section} is part of this configuration{hint}{chosen}"


def _choices(schema: Schema, field: Field) -> list[type]:
    rows = schema.rows(field)
    return [*rows.values(), *classes_in(field.hint)]


def _share_table(schema: Schema, first: str, second: str) -> bool:
    return any(first in rows and second in rows for rows in schema.tables.values())
