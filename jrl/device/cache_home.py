"""The folder of this user that everything jrl can make again is cached below. No JAX."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_home(environment: Mapping[str, str]) -> Path | None:
    """Returns $XDG_CACHE_HOME/jrl, or ~/.cache/jrl without that variable; None if that is not an absolute path, such as
    without a home directory."""
    home = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "jrl" if os.path.isabs(home) else None
