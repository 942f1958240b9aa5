"""A formula and the function that computes it, as data."""

from __future__ import annotations

from typing import TypedDict


class Part(TypedDict):
    id: str  # its name in docs/algorithms.md
    function: str  # module:name
    inputs: list[str]  # the function's parameters, in order
    output: str
    tests: list[str]  # file::function, where its numbers are checked by hand
