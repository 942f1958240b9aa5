"""Published model families: one file and one row each, name -> row. None is in this version."""

from __future__ import annotations

from typing import Any

FAMILIES: dict[str, Any] = {}
