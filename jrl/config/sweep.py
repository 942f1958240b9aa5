"""Expands bindings that list values into the bindings of every member of a sweep.

    AdamW.learning_rate=[1e-4, 3e-4]         # an axis of two values
    Run.seed=[0..4]                          # whole numbers, both ends included; on the command line
    Sampler.stop_strings=['.']               # not an axis: the field holds a list
    Sampler.stop_strings=[[], ['.']]         # an axis of two lists

A list is an axis if it is nested deeper than its field's type. A macro is judged by where it is used.
"""

from __future__ import annotations

import itertools
import random
import re
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple

from jrl.config.errors import COMMAND_LINE, ConfigError
from jrl.config.schema import Schema, Tables, fields_of, options_of, schema_of
from jrl.config.syntax import Macro, Statement, read_statements

MOST_MEMBERS = 1000  # a larger sweep is probably a typo
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_RANGE = re.compile(rf"{_QUOTED}|(?<![\w.])(?P<first>-?\d+)\s*\.\.\s*(?P<last>-?\d+)(?![\w.])")

Point = tuple[str, ...]  # one binding for each axis


class Axis(NamedTuple):
    """A field and its values, as gin text."""

    name: str
    values: tuple[str, ...]

    def binding(self, index: int) -> str:
        return f"{self.name}={self.values[index]}"


def read_axes(
    path: str | None, bindings: Sequence[str], root: type, tables: Tables
) -> tuple[tuple[Axis, ...], tuple[str, ...]]:
    """Returns the axes of a sweep, those of the file first, and the command-line bindings that are not axes.

    Names are checked when a member is loaded: a list for an unknown field is not an axis and stays a binding.

    Raises: ConfigError for a syntax error, an invalid range, an axis without values, or a list of macros that may be an
    axis or a value.
    """
    texts = [expand_ranges(binding) for binding in bindings]
    statements = read_statements(path, texts, root)
    schema = schema_of(root, tables)
    depths = {s.name: _depth_of_target(s, statements, schema) for s in statements if not s.is_block}
    last = {s.name: s for s in statements if not s.is_block}
    axes = []
    for name, statement in last.items():
        depth = depths[name]
        if depth is None or not isinstance(statement.value, list) or _nesting(statement.value) <= depth:
            continue
        if not statement.value:
            raise ConfigError(statement.location, f"{name} = [] lists no value, so the sweep would have no members")
        axes.append(Axis(name, tuple(gin_text(value) for value in statement.value)))
    swept = {axis.name for axis in axes}
    for name, statement in last.items():
        items = statement.value if name not in swept and isinstance(statement.value, list) else []
        if len(items) > 1 and all(isinstance(item, Macro) and item.name in swept for item in items):
            raise ConfigError(
                statement.location,
                f"{name} = {gin_text(items)} may list {len(items)} values to sweep, or be one value whose items are "
                f"swept. Write the lists in place of the macros, or {gin_text(tuple(items))} for one value",
            )
    from_command_line = statements[len(statements) - len(texts) :]
    fixed = tuple(text for text, statement in zip(texts, from_command_line) if statement.name not in swept)
    return tuple(axes), fixed


def expand_ranges(binding: str) -> str:
    """Returns a command-line binding with [0..4] written as [0, 1, 2, 3, 4]. Quoted text is unchanged.

    Raises: ConfigError for a range that is not of whole numbers or not in brackets, counts down, or has more than
    MOST_MEMBERS values.
    """

    def numbers(match: re.Match[str]) -> str:
        if match["first"] is None:
            return match[0]
        first, last = int(match["first"]), int(match["last"])
        if not 0 <= last - first < MOST_MEMBERS:
            raise ConfigError(COMMAND_LINE, f"{binding}: a range counts up, and has at most {MOST_MEMBERS} values")
        return ", ".join(map(str, range(first, last + 1)))

    expanded = _RANGE.sub(numbers, binding)
    if ".." in re.sub(_QUOTED, "", expanded):
        raise ConfigError(COMMAND_LINE, f"{binding}: a range must be of whole numbers, as in [0..4]; list other "
                          "values, and put text in quotes")  # fmt: skip
    if expanded != binding and not binding.partition("=")[2].strip().startswith("["):
        raise ConfigError(COMMAND_LINE, f"{binding}: a range must be in brackets, as in [0..4]")
    return expanded


def grid(axes: Sequence[Axis]) -> list[Point]:
    """Returns every combination, the last axis varying fastest. Raises: ValueError for more than MOST_MEMBERS."""
    count = 1
    for axis in axes:
        count *= len(axis.values)
    check_count(count)
    return list(itertools.product(*([axis.binding(i) for i in range(len(axis.values))] for axis in axes)))


def pairs(axes: Sequence[Axis]) -> list[Point]:
    """Returns the first values of all axes, the second values, ... Raises: ValueError for unequal lengths."""
    lengths = {axis.name: len(axis.values) for axis in axes}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"pairs need lists of one length: {listed}")
    return [tuple(axis.binding(i) for axis in axes) for i in range(max(lengths.values(), default=0))]


def draw(axes: Sequence[Axis], count: int, seed: int) -> list[Point]:
    """Returns `count` distinct combinations, drawn uniformly at random.

    Raises: ValueError if `count` is below 1, or above MOST_MEMBERS or the number of combinations.
    """
    combinations = 1
    for axis in axes:
        combinations *= len(axis.values)
    if not 1 <= count <= combinations:
        raise ValueError(f"{count} combinations were requested; the lists have {combinations}")
    check_count(count)
    rng = random.Random(seed)
    drawn: dict[Point, None] = {}
    while len(drawn) < count:
        drawn[tuple(axis.binding(rng.randrange(len(axis.values))) for axis in axes)] = None
    return list(drawn)


def check_count(count: int) -> None:
    """Raises ValueError if a sweep would have more than MOST_MEMBERS members."""
    if count > MOST_MEMBERS:
        raise ValueError(f"the sweep would have {count} members; at most {MOST_MEMBERS} are allowed")


def gin_text(value: Any) -> str:
    """Returns a parsed value as gin text."""
    if isinstance(value, list):
        return "[" + ", ".join(map(gin_text, value)) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(gin_text, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{gin_text(key)}: {gin_text(item)}" for key, item in value.items()) + "}"
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else str(value)


def _depth_of_target(
    statement: Statement, statements: Sequence[Statement], schema: Schema, trail: tuple[Macro, ...] = ()
) -> int | None:
    """Returns the depth of nested lists in the type of a statement's field; None if there is no such field.

    A macro has the largest depth that its users have where they mention it. trail: the macros on the way to it.
    """
    if not statement.field:
        macro = Macro(statement.section)
        if macro in trail:
            return 0  # defined by itself, which the reader refuses
        depths = [0]
        for user in statements:
            for level in _levels(user.value, macro):
                depth = _depth_of_target(user, statements, schema, (*trail, macro)) or 0
                depths.append(depth - level + (isinstance(user.value, list) and _nesting(user.value) > depth))
        return max(depths)
    cls = schema.sections.get(statement.section)
    if cls is None or statement.field not in fields_of(cls):
        return None
    return _depth_of_hint(fields_of(cls)[statement.field].hint)


def _levels(value: Any, macro: Macro) -> set[int]:
    """Returns in how many lists the mentions of a macro are nested in a value."""
    if isinstance(value, list | tuple):
        return {level + 1 for item in value for level in _levels(item, macro)}
    return {0} if value == macro else set()


def _depth_of_hint(hint: Any) -> int:
    options = options_of(hint)
    if len(options) > 1:
        return max(map(_depth_of_hint, options))
    if typing.get_origin(hint) is not tuple:
        return 0
    parts = [part for part in typing.get_args(hint) if part is not Ellipsis and part != ()]
    return 1 + max(map(_depth_of_hint, parts), default=0)


def _nesting(value: Any) -> int:
    return 1 + max(map(_nesting, value), default=0) if isinstance(value, list | tuple) else 0
