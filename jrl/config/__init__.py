"""Loads gin text into frozen dataclasses. An error names its location, such as file and line. No JAX, no global state.

    include 'base.gin'                 # in this file's folder, else bundled; bindings here replace its bindings
    STEPS = 30                         # a macro
    Online.steps = %STEPS              # section (a dataclass, by class name) and field
    Online.objective = @DAPO()         # a row of a table
    DAPO:                              # a block
      clip_high = 0.28
    Online.optimizer = @warm/AdamW()   # one scope level: AdamW's bindings, then warm/AdamW's
    warm/AdamW.learning_rate = 1e-3
    parts = ['my_parts.py']            # no section: a field of the root

`load` reads gin, `to_gin` and `to_json` write a resolved configuration, `from_json` reads it back, `difference` and
`identity` compare two runs, `describe` and `describe_section` return the help text.
"""

from jrl.config.compare import difference, identity
from jrl.config.describe import describe, describe_section, field_docs
from jrl.config.dump import from_json, to_gin, to_json
from jrl.config.errors import ConfigError, nearest
from jrl.config.load import load, peek, reached
from jrl.config.schema import all_fields

__all__ = [
    "ConfigError",
    "all_fields",
    "describe",
    "describe_section",
    "difference",
    "field_docs",
    "from_json",
    "identity",
    "load",
    "nearest",
    "peek",
    "reached",
    "to_gin",
    "to_json",
]
