"""The state of one load, shared by the builder and the check for unused bindings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from jrl.config.schema import Schema
from jrl.config.syntax import Statement

Key = tuple[str, str, str]  # scope, section, field


@dataclasses.dataclass(frozen=True)
class Reading:
    """The state of one load. The sets and `shadowed` record what was reached, `work` counts; the rest is constant."""

    schema: Schema
    bindings: Mapping[Key, Statement]
    macros: Mapping[str, Statement]
    origin: str  # the location that an error names if no statement applies
    used: set[Key]
    shadowed: dict[Key, Statement]  # unscoped binding -> the scoped one that overrode it
    used_macros: set[str]
    instances: set[tuple[str, str]]  # (scope, section) of everything built
    work: Iterator[int]  # counts expanded values and built instances
    path_fields: frozenset[str]  # "Class.field" of the fields that name files
