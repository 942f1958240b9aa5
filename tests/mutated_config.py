"""Every value of a configuration, and the same configuration with another value in one place."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from jrl.config.schema import fields_of, options_of


class Leaf(NamedTuple):
    """A value of a configuration, where it is, and the field that holds it."""

    place: tuple[str | int, ...]  # ("stages", 1, "lag")
    field: str  # "Online.lag"
    hint: Any
    value: Any

    @property
    def name(self) -> str:
        return ".".join(map(str, self.place))


def leaves(part: Any, place: tuple[str | int, ...] = ()) -> Iterator[Leaf]:
    """Yields every value of a configuration that is no configuration itself."""
    for field in fields_of(type(part)).values():
        value, here = getattr(part, field.name), (*place, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, here)
        elif isinstance(value, tuple) and value and all(map(dataclasses.is_dataclass, value)):
            for index, item in enumerate(value):
                yield from leaves(item, (*here, index))
        else:
            yield Leaf(here, f"{type(part).__name__}.{field.name}", field.hint, value)


def replaced(part: Any, place: tuple[str | int, ...], value: Any) -> Any:
    """Returns the configuration with a value in a place."""
    if not place:
        return value
    first, *rest = place
    if isinstance(part, tuple):
        return (*part[:first], replaced(part[first], tuple(rest), value), *part[first + 1 :])
    return dataclasses.replace(part, **{first: replaced(getattr(part, first), tuple(rest), value)})


def others(leaf: Leaf) -> list[Any]:
    """Returns values of the field's types that differ from its own; not all of them make sense in it."""
    found: list[Any] = []
    for hint in options_of(leaf.hint):
        origin, of = typing.get_origin(hint), typing.get_args(hint)
        if origin is Literal:
            found += of
        elif hint is bool:
            found += [False, True]
        elif hint in (int, float):
            base = leaf.value if type(leaf.value) in (int, float) else 1
            found += [hint(number) for number in (base * 2, base + 1, base - 1, base / 2, 3, 0)]
        elif hint is str:
            found += [f"{leaf.value or ''}x", "max"]
        elif hint is type(None):
            found.append(None)
        elif dataclasses.is_dataclass(hint) and all(field.default is not None for field in fields_of(hint).values()):
            found.append(hint())
        elif origin is tuple and of[0] in (str, int, float, bool):
            given = leaf.value if isinstance(leaf.value, tuple) else ()
            found += [(*given, of[0](1)), given[:-1]]
    return [value for value in found if type(value) is not type(leaf.value) or value != leaf.value]


def mutations(config: Any, leaf: Leaf) -> Iterator[tuple[Any, Any]]:
    """Yields (configuration, value) for every other value of a field that the configuration accepts."""
    for value in others(leaf):
        try:
            yield replaced(config, leaf.place, value), value
        except (ValueError, TypeError):  # as its owner says, the value makes no sense there
            continue
