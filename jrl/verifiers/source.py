"""A user's verifiers as source text: how they reach the template, whichever way the run was started."""

from __future__ import annotations

import dataclasses
import linecache
import sys
import types
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class PartSource:
    """The text of one parts file, and the name its tracebacks show."""

    filename: str
    source: str


def load_module(part: PartSource, place: int) -> types.ModuleType:
    """Returns the module that a part is.

    This is the one place in jrl that runs text as code, and the text is the user's own file: what the command line
    named or the notebook passed, never anything a model or a data set wrote.

    Raises: whatever the part raises while it runs.
    """
    name = f"jrl_part_{place}"
    module = types.ModuleType(name)
    module.__file__ = part.filename
    sys.modules[name] = module  # dataclasses look their annotations up there
    linecache.cache[part.filename] = (len(part.source), None, part.source.splitlines(True), part.filename)
    exec(compile(part.source, part.filename, "exec"), module.__dict__)
    return module


def load_part(part: PartSource, place: int) -> Mapping[str, Any]:
    """Returns the VERIFIERS dict that a part defines; {} where it defines none.

    Raises:
        ValueError: the part's VERIFIERS is not a dict.
        Whatever the part raises while it runs.
    """
    verifiers = vars(load_module(part, place)).get("VERIFIERS", {})
    if not isinstance(verifiers, Mapping):
        raise ValueError(f"{part.filename}: VERIFIERS is a {type(verifiers).__name__}; it must be a dict: name -> row")
    return verifiers
