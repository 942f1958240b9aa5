"""Checks that every name in a statement exists, even if a later statement overrides it."""

from __future__ import annotations

from jrl.config.errors import MOST_LISTED, ConfigError, nearest, suggestion
from jrl.config.schema import Schema, classes_in, fields_of
from jrl.config.syntax import Macro, Reference, Statement, walk

SINGULAR = {"strategies": "strategy", "curricula": "curriculum"}  # names of tables that end otherwise than in one "s"


def check_names(statement: Statement, schema: Schema, macros: set[str]) -> None:
    """Raises ConfigError if a statement uses a name that does not exist, even if a later statement overrides it."""
    _check_target(statement, schema)
    for leaf in walk(statement.value):
        if isinstance(leaf, Reference):
            if leaf.name not in schema.sections:
                raise ConfigError(
                    statement.location, f"{statement.name}: {_unknown_part(leaf.name, statement, schema)}"
                )
            if "/" in leaf.scope or "." in leaf.scope:
                raise ConfigError(statement.location, f"{leaf}: a scope has one level, @scope/{leaf.name}()")
            if not leaf.called:
                raise ConfigError(statement.location, f"{leaf} must be written {leaf}(): only built parts are values")
        elif isinstance(leaf, Macro) and leaf.name not in macros:
            hint = suggestion(leaf.name, macros, kind="macros")
            raise ConfigError(statement.location, f"{statement.name}: macro {leaf} is not defined{hint}")


def _unknown_part(name: str, statement: Statement, schema: Schema) -> str:
    """Returns the error message for a reference to an unknown part. It lists the parts that the bound field accepts."""
    cls = schema.sections.get(statement.section)
    field = None if cls is None else fields_of(cls).get(statement.field)
    if field is None:  # a macro, which any field may use
        return f"unknown part {name!r}{suggestion(name, schema.sections, kind='sections')}"
    valid = sorted({*schema.rows(field), *(c.__name__ for c in classes_in(field.hint))})
    kind = "part" if field.table is None else SINGULAR.get(field.table, field.table.removesuffix("s"))
    guess = nearest(name, valid)
    hint = f"; did you mean {guess}?" if guess else "."
    return f"unknown {kind} {name!r}{hint} Available: {', '.join(valid) or 'none'}"


def _check_target(statement: Statement, schema: Schema) -> None:
    section, field, location = statement.section, statement.field, statement.location
    if not field and not statement.is_block:
        if statement.scope:
            raise ConfigError(location, f"{statement.name}: a macro takes no scope")
        if section in schema.sections:
            raise ConfigError(location, f"{section} is a section; bind one of its fields, {section}.field = value")
        return
    if section not in schema.sections:
        full = f"{section}.{field}"
        keys = [f"{name}.{f}" for name, cls in schema.sections.items() for f in fields_of(cls)]
        guess = nearest(section, schema.sections) if statement.is_block else nearest(full, keys)
        hint = f"; did you mean {guess}?" if guess else suggestion(section, schema.sections, kind="sections")
        raise ConfigError(location, f"there is no section {section!r}{hint}")
    if statement.is_block:
        return
    fields = fields_of(schema.sections[section])
    if field not in fields:
        hint = suggestion(field, fields, kind=f"fields of {section}")
        elsewhere = [name for name, cls in schema.sections.items() if field in fields_of(cls)]
        if nearest(field, fields) is None and 0 < len(elsewhere) <= MOST_LISTED:
            hint += f"; sections that have it: {', '.join(elsewhere)}"
        raise ConfigError(location, f"{section} has no field {field!r}{hint}")
