"""The record of a command."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Command:
    """One command: its line in `jrl --help`, an example, its arguments, and a function that runs it and returns an exit
    code.
    """

    summary: str
    example: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
