"""Rows of a data set that is written as several files, read as one. No JAX."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

BITS = 48  # of a position that are the file's own; the higher ones are the file's index


class Shards:
    """A Reader of the rows of several readers, one after another. Rows are numbered through.

    Args:
      readers: taken one by one as rows are read: opening a Parquet file reads all of it, and the first row may be bad.
    """

    def __init__(self, readers: Iterable[Any]) -> None:
        self._unread = enumerate(readers)
        self._readers: list[Any] = []
        self._before = [0]  # rows before each file that was read

    def each(self) -> Iterator[tuple[int, int, Any]]:
        for index, reader in self._unread:
            self._readers.append(reader)
            before = last = self._before[-1]
            for number, position, row in reader.each():
                last = before + number
                yield last, index << BITS | position, row
            self._before.append(last)

    def at(self, position: int) -> dict[str, Any]:
        index, within = position >> BITS, position & (1 << BITS) - 1
        return self._readers[index].at(within)

    def place(self, number: int) -> str:
        index = min(bisect.bisect_left(self._before, number), len(self._readers)) - 1
        return self._readers[index].place(number - self._before[index])

    def digest(self) -> str:
        return hashlib.sha256("\n".join(reader.digest() for reader in self._readers).encode()).hexdigest()

    def counts(self) -> dict[str, int]:
        totals: dict[str, int] = {}
        for reader in self._readers:
            for cause, count in reader.counts().items():
                totals[cause] = max(totals.get(cause, 0), count)
        return totals
