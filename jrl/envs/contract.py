"""What an environment is: a config class and a function that opens it as a source of examples. No JAX.

A source has `len(source)` and `source[index] -> Example` for 0 <= index < len. The same config and index always give
the same example, in any order and in any process. A source may have `counts`, a dict of what it dropped or noticed by
cause ("bad_json": 3), and `fingerprint`, a hex digest of what decides its examples beyond the config (a file's bytes).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jrl.example import Example


class Source(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


class Environment(NamedTuple):
    """A row of the environment table."""

    config: type  # frozen dataclass
    open: Callable[[Any], Source]  # config -> source


@dataclasses.dataclass(frozen=True)
class Generated:
    """A source made by a function of the index: what a generator of tasks becomes, so that any position can be resumed.

    `make` must be a function of `index` alone: seed a `random.Random` with it, keep no state between calls.
    """

    size: int
    make: Callable[[int], Example]
    counts: dict[str, int] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        return self.make(in_range(index, self.size))


def in_range(index: int, size: int) -> int:
    """Returns `index` as an int. Raises IndexError outside 0..size-1, also below 0: nothing is counted from the end."""
    if not 0 <= index < size:
        raise IndexError(f"index {index} of a source of {size} examples")
    return int(index)


def index_seed(*parts: int | str) -> str:
    """Returns a seed for `random.Random` that names `parts`; strings seed it through sha512, alike on every machine."""
    return "/".join(str(part) for part in parts)
