"""What one load works on, shared by building and by the search for what was not used."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from jrl.config.schema import Schema
from jrl.config.syntax import Statement

Key = tuple[str, str, str]  # scope, section, field


@dataclasses.dataclass(frozen=True)
class Reading:
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
    path_fields: frozenset[str]  # "Class.field" of what names files
