"""The contract of an environment: a config class and a function that opens it as a source of examples. No JAX.

A source has `len(source)` and `source[index] -> Example` for 0 <= index < len. The same config and index always give
the same example, in any order and in any process. `source.fingerprint` is a hex digest of everything that decides the
examples (a file's bytes, a generator's version) and part of a run's identity. `source.counts` counts what was dropped
or noticed when the source was opened, by cause ("bad_json": 3). The optional `source.verifiers` has every name in
`Example.verifiers` of its examples; an unknown one is an error before the run starts. The optional `source.task` has
the task index of each example; curricula choose between these tasks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from jrl.tasks.example import Example

REPEATED_PROMPT = "duplicate_prompt"  # the count of examples that are kept though an earlier one has their prompt


class Source(Protocol):
    fingerprint: str
    counts: dict[str, int]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


def check_opened(name: str, source: Any) -> None:
    """Raises ValueError if an environment's `open` did not return a Source, or its first example is not an Example."""
    for member in ("__len__", "__getitem__", "fingerprint", "counts"):
        if not hasattr(source, member):
            raise ValueError(f"{name} must open a source, such as jrl.tasks.envs.contract.Generated, but opened a "
                             f"{type(source).__name__}, which has no {member}")  # fmt: skip
    if len(source) and not isinstance(example := source[0], Example):
        raise ValueError(f"{name} is a source of examples: its first must be a jrl.tasks.example.Example, but is a "
                         f"{type(example).__name__}")  # fmt: skip


class Environment(NamedTuple):
    """A row of the environment table."""

    config: type  # frozen dataclass
    open: Callable[..., Source]  # config -> source
    takes_stop: bool = False  # open takes (config, stop), a jrl.tasks.stopping.Stop that it polls while reading


@dataclasses.dataclass(frozen=True)
class Generated:
    """A source defined by a function of the index, so that a run can resume at any position.

    `make` must depend on `index` only: seed a `random.Random` with it and keep no state between calls.
    """

    size: int
    make: Callable[[int], Example]
    fingerprint: str  # jrl.tasks.envs.contract.digest_of what decides the examples
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    verifiers: frozenset[str] | None = None  # None: unknown
    task: np.ndarray | None = None  # [size] int32, the index of the example's task; None: there is only one

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        return self.make(in_range(index, self.size))


def named_verifiers(source: Source) -> frozenset[str]:
    """Returns the verifiers that the examples of `source` name: those it declares, else those of its first 64."""
    declared = getattr(source, "verifiers", None)
    if declared is not None:
        return declared
    return frozenset(name for i in range(min(len(source), 64)) for name in source[i].verifiers)


def tasks_of(source: Source) -> np.ndarray:
    """Returns the task index of each example of `source`, [P] int32; zeros if it has no `task`."""
    task = getattr(source, "task", None)
    return np.zeros(len(source), np.int32) if task is None else task


def in_range(index: int, size: int) -> int:
    """Returns `index` as an int. Raises IndexError outside 0..size-1: negative indices do not count from the end."""
    if not 0 <= index < size:
        raise IndexError(f"index {index} of a source of {size} examples")
    return int(index)


def digest_of(*parts: Any) -> str:
    """Returns the sha256 (hex) of str() of the parts: a fingerprint, or a portable seed for `random.Random`."""
    return hashlib.sha256("\x00".join(map(str, parts)).encode()).hexdigest()


def stamp_of(file: IO[bytes]) -> tuple[int, int]:
    """Returns (size in bytes, mtime in nanoseconds) of an open file, to detect changes."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def check_unchanged(file: IO[bytes], stamp: tuple[int, int] | None, path: str | os.PathLike[str]) -> None:
    """Raises ValueError if an open file has changed since its `stamp_of` was taken."""
    if stamp_of(file) != stamp:
        raise ValueError(f"{path} changed while it was being read")
