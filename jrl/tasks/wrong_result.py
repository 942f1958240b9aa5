"""The error of a function of a part that returns something else than its contract says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class WrongResult(ValueError):
    """A function of a part's row returned something else than its contract says. `function` is that function."""

    def __init__(self, message: str, function: Callable[..., Any]):
        super().__init__(message)
        self.function = function
