"""Writes a resolved configuration as gin or JSON, with every field explicit, and reads the JSON back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from jrl.config.errors import ConfigError, nearest, suggestion
from jrl.config.schema import Field, Schema, Tables, classes_in, fields_of, is_config, schema_of
from jrl.config.typed import Misfit, fit, show


def to_json(config: Any) -> dict[str, Any]:
    """Returns the configuration as JSON values. An instance has a "class" entry if its annotation does not fix it."""
    return {name: _plain(getattr(config, name), _is_open(field)) for name, field in fields_of(type(config)).items()}


def from_json(data: Mapping[str, Any], root: type, tables: Tables, *, location: str = "JSON") -> Any:
    """Returns the instance of `root` that `to_json` described. A missing field takes its default.

    Raises: ConfigError at "LOCATION at field.field" for an unknown name, a wrong type or a missing required field.
    """
    return _from_object(data, root, schema_of(root, tables), location, "")


def to_gin(config: Any, tables: Tables) -> str:
    """Returns gin text with every field explicit. Loading it gives an equal object.

    A nested dataclass is referred to by name. If a class occurs with several values, each after the first gets a scope,
    named after the field that holds it.
    """
    schema = schema_of(type(config), tables)
    names: dict[tuple[str, str], str] = {}  # (class name, canonical JSON) -> scoped name
    waiting = [(config, type(config).__name__)]  # breadth first: the fields of the root get the unscoped names

    def name_of(part: Any, hint: str) -> str:
        kind = type(part).__name__
        if schema.sections.get(kind) is not type(part):
            raise TypeError(f"{kind} is in no table and in no annotation of {type(config).__name__}")
        value = json.dumps(to_json(part), sort_keys=True)
        if (kind, value) not in names:
            taken = {name for (other, _), name in names.items() if other == kind}
            names[kind, value] = next(name for name in scoped_names(kind, hint) if name not in taken)
            waiting.append((part, names[kind, value]))
        return f"@{names[kind, value]}()"

    def text(value: Any, hint: str) -> str:
        if is_config(type(value)):
            return name_of(value, hint)
        if isinstance(value, tuple | list):
            return "[" + ", ".join(text(item, hint) for item in value) + "]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {text(item, hint)}" for key, item in value.items()) + "}"
        return repr(value)

    blocks = []
    for part, name in waiting:
        lines = [f"{name}.{field} = {text(getattr(part, field), field)}\n" for field in fields_of(type(part))]
        blocks.append("".join(lines))
    return "\n".join(block for block in blocks if block)


def scoped_names(kind: str, hint: str) -> Iterator[str]:
    """Yields candidate names for an instance of a class, in order of preference.

    Args:
      kind: the name of the class.
      hint: the field that holds the instance; it becomes the scope.
    """
    yield kind
    yield f"{hint}/{kind}"
    yield from (f"{hint}_{i}/{kind}" for i in itertools.count(2))


def _is_open(field: Field) -> bool:
    return field.table is not None or len({*classes_in(field.hint)}) > 1


def _plain(value: Any, tagged: bool) -> Any:
    if is_config(type(value)):
        return ({"class": type(value).__name__} if tagged else {}) | to_json(value)
    if isinstance(value, tuple | list):
        return [_plain(item, tagged) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, tagged) for key, item in value.items()}
    return value


def _from_object(data: Any, cls: type, schema: Schema, location: str, path: str) -> Any:
    here = f"{location} at {path}" if path else location
    if not isinstance(data, Mapping):
        raise ConfigError(here, f"{cls.__name__} expects an object, got {show(data)}")
    fields = fields_of(cls)
    for key in data:
        if key not in fields and key != "class":
            hint = suggestion(key, fields, kind=f"fields of {cls.__name__}")
            raise ConfigError(here, f"{cls.__name__} has no field {key!r}{hint}")
    values = {}
    for name, field in fields.items():
        inner = f"{path}.{name}" if path else name
        if name in data:
            values[name] = _from_value(data[name], cls, field, schema, location, inner)
        elif field.default is None:
            raise ConfigError(here, f"{cls.__name__}.{name} has no value and no default")
        else:
            values[name] = field.default()
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(here, f"{cls.__name__}: {error}") from error


def _from_value(value: Any, cls: type, field: Field, schema: Schema, location: str, path: str) -> Any:
    def instance(part: Any, allowed: Mapping[str, type]) -> Any:
        if not isinstance(part, Mapping):
            raise Misfit(f"expects an object, got {show(part)}")
        name = part.get("class", next(iter(allowed)) if len(allowed) == 1 and not _is_open(field) else None)
        if name not in allowed:
            guess = nearest(name, allowed) if isinstance(name, str) else None
            hint = f"; did you mean {guess}?" if guess else ""
            raise Misfit(f'expects "class" to be one of {", ".join(allowed)}, got {show(name)}{hint}')
        return _from_object(part, allowed[name], schema, location, path)

    try:
        return fit(value, field.hint, schema.rows(field), instance)
    except Misfit as misfit:
        raise ConfigError(
            f"{location} at {path}", f"{cls.__name__}.{field.name}{misfit.inside} {misfit.reason}"
        ) from None
