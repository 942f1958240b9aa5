"""What makes two runs one experiment: their settings, which are the fields of config.gin that can matter."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

from jrl import config as gin
from jrl.config.sweep import gin_text
from jrl.config.syntax import Statement, read_statements
from jrl.experiment import FREE, ROUNDED, Config

SEED = "Run.seed"  # runs that differ in it alone are one variant
# Fields in which two runs may differ and still be the same experiment. A mesh and a kernel are experiments: they have
# a speed.
IRRELEVANT = tuple(name for name in FREE if name not in (*ROUNDED, "MeshShape.*"))


def settings_of(statements: Iterable[Statement]) -> tuple[str, dict[str, str]]:
    """Returns the seed, and "AdamW.learning_rate" -> "0.001" for every field that makes another experiment of a run."""
    bound = {statement.name: gin_text(statement.value) for statement in statements if not statement.is_block}
    return bound.get(SEED, ""), {name: value for name, value in bound.items() if not is_irrelevant(name)}


def settings_of_config(config: Config, tables: Any) -> tuple[str, dict[str, str]]:
    """Returns the same of a configuration that has not run: what its config.gin will say."""
    lines = [line for line in gin.to_gin(config, tables).splitlines() if line]
    return settings_of(read_statements(None, lines, Config))


def is_irrelevant(name: str) -> bool:
    """Returns whether two runs that differ in a field are still one experiment, up to their seeds."""
    field = name.rpartition("/")[2]
    return field == SEED or any(fnmatch.fnmatchcase(field, pattern) for pattern in IRRELEVANT)
