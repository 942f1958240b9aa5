"""The tables of registered parts and the list of formulas, for `jrl list`."""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from pathlib import Path
from typing import Any

from jrl.algos.parts import OBJECTIVE_FUNCTIONS, PARTS
from jrl.config import field_docs
from jrl.experiment import TABLES, Tables
from jrl.models.families import FAMILIES
from jrl.models.families.contract import HARMLESS, Family
from jrl.models.shape import Decoder
from jrl.resolve import bundled_configs
from jrl.tasks.envs.layouts import LAYOUTS
from jrl.tasks.envs.layouts.contract import Layout

KINDS = ("configs", "parts", *TABLES, "layouts", "families")


def rows(kind: str, tables: Tables = TABLES) -> list[dict[str, Any]]:
    """Returns one dict of JSON values per entry.

    Configs: {"name","doc","path"}. Parts: {"id","function","inputs","output","tests"}.
    Tables: {"name","doc","config","fields"}; families also have {"model_type","architecture","keys","harmless"}, which
    describe their config.json. Layouts: {"name","doc","takes","rank_by","example"}.
    """
    match kind:
        case "configs":
            return [
                {"name": name, "doc": headline(path), "path": str(path)} for name, path in bundled_configs().items()
            ]
        case "parts":
            return [dict(part) for part in (*PARTS, *OBJECTIVE_FUNCTIONS)]
        case "layouts":
            return [_layout(name, row) for name, row in LAYOUTS.items()]
        case "families":
            return [_family(name, row) for name, row in FAMILIES.items()]
    return [_row(name, row) for name, row in tables[kind].items()]


def table(kind: str, tables: Tables = TABLES) -> str:
    """Returns the entries as text, one line each."""
    entries = rows(kind, tables)
    if kind == "parts":
        cells = [
            (part["id"], part["function"], f"({', '.join(part['inputs'])}) -> {part['output']}") for part in entries
        ]
        return "\n".join(f"{part_id:<4} {function:<48} {signature}" for part_id, function, signature in cells)
    width = max((len(row["name"]) for row in entries), default=0)
    lines = [f"{row['name']:<{width}}  {row['doc']}" for row in entries]
    return "\n".join(lines) if lines else f"jrl has no {kind} of its own; --parts PARTS.py lists yours"


def headline(path: Path) -> str:
    """Returns the first sentence of the comment at the top of a gin file; "" if there is none."""
    with open(path, encoding="utf-8") as file:
        lines = [line.lstrip("#").strip() for line in itertools.takewhile(lambda line: line.startswith("# "), file)]
    return re.split(r"(?<=\.)(?<!\bDr\.) ", " ".join(lines), maxsplit=1)[0]


def _row(name: str, row: Any) -> dict[str, Any]:
    config = row.config
    return {
        "name": name,
        "doc": _summary(config),
        "config": f"{config.__module__}:{config.__qualname__}",
        "fields": field_docs(config),
    }


def _layout(name: str, row: Layout) -> dict[str, Any]:
    return {
        "name": name,
        "doc": row.of,
        "takes": list(row.takes),
        "rank_by": list(row.rank_by),
        "example": row.example,
    }


def _family(name: str, row: Family) -> dict[str, Any]:
    text = inspect.getdoc(sys.modules[row.read.__module__]) or ""
    return {
        "name": name,
        "doc": f"{row.architecture}. {' '.join(text.split())}",
        "config": f"{Decoder.__module__}:{Decoder.__qualname__}",
        "fields": field_docs(Decoder),
        "model_type": row.model_type,
        "architecture": row.architecture,
        "keys": sorted(row.keys),
        "harmless": sorted({*HARMLESS, *row.harmless}),
    }


def _summary(config: type) -> str:
    """Returns the first paragraph of a config class's docstring, else of its module's."""
    text = inspect.getdoc(config) or ""
    if not text or text.startswith(f"{config.__name__}("):  # the docstring that dataclasses generate
        text = inspect.getdoc(sys.modules[config.__module__]) or ""
    return " ".join(text.split("\n\n")[0].split())
