"""Rejects macros and bindings that reach nothing. The rule is in `jrl.config.load`."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jrl.config.errors import ConfigError, nearest
from jrl.config.reading import Reading
from jrl.config.schema import Field, Schema, classes_in, fields_of, is_config
from jrl.config.syntax import Macro, Reference, Statement, walk


def check_macros(reading: Reading, statements: Sequence[Statement]) -> None:
    mentioned = {leaf.name for s in statements for leaf in walk(s.value) if isinstance(leaf, Macro)}
    for name, statement in reading.macros.items():
        reached = reading.used_macros if statement.layer == 0 else mentioned
        if name in reached:
            continue
        guess = nearest(name, mentioned - {name}) or _fields_like(name, reading)
        hint = f"; did you mean {guess}?" if guess else f"; nothing uses %{name}"
        if name in mentioned:
            hint = f"; every binding that uses %{name} is replaced or unused"
        raise ConfigError(statement.location, f"macro {name} is never used{hint}")


def _fields_like(name: str, reading: Reading) -> str | None:
    """Returns the fields that an unused macro may have been meant for: those with its name, else the nearest one, else
    None."""
    root = fields_of(reading.schema.root)
    keys = [f"{section}.{field}" for section, cls in reading.schema.sections.items() for field in fields_of(cls)]
    same = [key for key in keys if key.endswith(f".{name}")]
    likely = {section for _, section, _ in reading.bindings}
    likely |= {cls.__name__ for field in root.values() for cls in classes_in(field.hint)}
    same = [key for key in same if key.partition(".")[0] in likely] or same[:1]
    return " or ".join(same) or nearest(name, root) or nearest(name, keys)


def check_unused(reading: Reading, statements: Sequence[Statement]) -> None:
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
                statement.location, f"unused binding: {statement.name}: {scoped.name} at {scoped.location} wins"
            )
        raise ConfigError(statement.location, _unused(reading, statement))


def _replaced_selections(reading: Reading, statements: Sequence[Statement]) -> Iterator[tuple[int, set[str]]]:
    """Yields (layer that replaced a value or default, sections that the replaced one would have brought in)."""
    for statement in statements:
        if statement.field:
            winner = reading.bindings[statement.scope, statement.section, statement.field]
            field = fields_of(reading.schema.sections[statement.section])[statement.field]
            if winner is statement:
                yield statement.layer, _sections_reached(reading.schema, statements, _default_parts(field))
        else:
            winner = reading.macros.get(statement.section)
        if winner is not None and winner.layer < statement.layer:
            yield winner.layer, _sections_reached(reading.schema, statements, walk(statement.value))


def _default_parts(field: Field) -> Iterator[Reference]:
    classes = [type(leaf) for leaf in walk(field.default())] if field.default else [field.hint]
    return (Reference("", cls.__name__, True) for cls in classes if is_config(cls))


def _sections_reached(schema: Schema, statements: Sequence[Statement], leaves: Iterable[Any]) -> set[str]:
    """Returns the sections that parsed values refer to, directly or through macros, other bindings and defaults."""
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


def _unused(reading: Reading, statement: Statement) -> str:
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
    same_field = [name for _, name in sorted(reading.instances) if field in fields_of(reading.schema.sections[name])]
    siblings = [name for name in same_field if _share_table(reading.schema, name, section)]
    guess = siblings[0] if siblings else nearest(section, same_field)
    hint = f". Did you mean {guess}.{field}?" if guess else ""
    holders = {
        f"{scope}/{name}.{f.name}" if scope else f"{name}.{f.name}": f
        for name, cls in reading.schema.sections.items()
        for f in fields_of(cls).values()
        if section in {c.__name__ for c in _choices(reading.schema, f)}
        for scope in sorted(scope for scope, n in reading.instances if n == name)
    }
    chosen = ""
    if holders:
        is_list = typing.get_origin(next(iter(holders.values())).hint) in (tuple, list)
        value = f"[@{section}()]" if is_list else f"@{section}()"
        chosen = f"{'' if hint else '.'} To select {section}, bind {' or '.join(holders)} = {value}"
    return f"{text}: no {section} is part of this configuration{hint}{chosen}"


def _choices(schema: Schema, field: Field) -> list[type]:
    rows = schema.rows(field)
    return [*rows.values(), *classes_in(field.hint)]


def _share_table(schema: Schema, first: str, second: str) -> bool:
    return any(first in rows and second in rows for rows in schema.tables.values())
