"""Compares two resolved configurations, and hashes one to identify its run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from typing import Any

from jrl.config.schema import fields_of, is_config
from jrl.config.typed import show_resolved


def difference(a: Any, b: Any, ignore: Collection[str] = ()) -> list[str]:
    """Returns one line for each field in which `b` differs from `a`: "Online.steps: 30 -> 40".

    Args:
      ignore: as in `identity`.
    """
    return list(_differences(a, b, type(a).__name__, frozenset(ignore)))


def identity(config: Any, ignore: Collection[str] = ()) -> str:
    """Returns the sha256, in hex, of the canonical JSON of a configuration.

    Args:
      config: a resolved configuration.
      ignore: fields that do not distinguish runs: "Online.steps" leaves out one field of every Online, "Log.*" all
        fields of every Log.

    Raises: ValueError if `ignore` names a field that a class in the configuration does not have.
    """
    present = set(_classes(config))
    for name in ignore:
        section, _, field = name.partition(".")
        for cls in present:
            if cls.__name__ == section and field != "*" and field not in fields_of(cls):
                raise ValueError(f"identity: {section} has no field {field!r}")
    text = json.dumps(_canonical(config, frozenset(ignore)), sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical(value: Any, ignore: frozenset[str]) -> Any:
    if is_config(type(value)):
        name = type(value).__name__
        fields = {field: _canonical(getattr(value, field), ignore) for field in _compared_fields(type(value), ignore)}
        return {"class": name, "fields": fields}
    if isinstance(value, dict):
        return {key: _canonical(item, ignore) for key, item in value.items()}
    return [_canonical(item, ignore) for item in value] if isinstance(value, tuple | list) else value


def _compared_fields(cls: type, ignore: frozenset[str]) -> list[str]:
    return [field for field in fields_of(cls) if not {f"{cls.__name__}.{field}", f"{cls.__name__}.*"} & ignore]


def _classes(value: Any) -> Iterator[type]:
    if is_config(type(value)):
        yield type(value)
        for field in fields_of(type(value)):
            yield from _classes(getattr(value, field))
    elif isinstance(value, dict | tuple | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _classes(item)


def _differences(a: Any, b: Any, name: str, ignore: frozenset[str]) -> Iterator[str]:
    if is_config(type(a)) and type(a) is type(b):
        # Bindings name a class, so the lines do too; an item of a list has its index as a prefix.
        prefix = f"{name} {type(a).__name__}" if name.endswith("]") else type(a).__name__
        for field in _compared_fields(type(a), ignore):
            yield from _differences(getattr(a, field), getattr(b, field), f"{prefix}.{field}", ignore)
    elif isinstance(a, tuple | list) and isinstance(b, tuple | list) and len(a) == len(b) and _contains_configs(a):
        for i, (first, second) in enumerate(zip(a, b)):
            yield from _differences(first, second, f"{name}[{i}]", ignore)
    elif type(a) is not type(b) or a != b:
        yield f"{name}: {show_resolved(a)} -> {show_resolved(b)}"


def _contains_configs(items: Any) -> bool:
    return any(is_config(type(item)) for item in items)
