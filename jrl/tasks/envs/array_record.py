"""Random access to the rows of an ArrayRecord file, each the JSON text of one object. No JAX."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from jrl import paths
from jrl.tasks.envs.contract import check_unchanged, stamp_of
from jrl.tasks.stopping import Stop, check_stop, never

ENDINGS = (".array_record", ".arrayrecord")
BATCH = 256  # records read at once
CHUNK = 1 << 20


class ArrayRecords:
    """The rows of one file."""

    def __init__(self, path: str, parse: Callable[[bytes], dict[str, Any]], stop: Stop = never) -> None:
        """Opens the file. `parse`: bytes -> row, raises BadRow.

        Raises: OSError if it cannot be opened; ValueError if it is damaged or not an ArrayRecord file.
        """
        self._path, self._parse = path, parse
        paths.check_not_special(path)
        with open(paths.local(path), "rb") as file:
            self._stamp = stamp_of(file)
            digest = hashlib.sha256()
            while chunk := file.read(CHUNK):
                check_stop(stop, f"reading {path}")
                digest.update(chunk)
        self._digest = digest.hexdigest()
        from array_record.python.array_record_module import ArrayRecordReader

        self._reader = self._guarded(lambda: ArrayRecordReader(str(paths.local(path))))
        if self._stamp[0] and not self._reader.num_records():
            self._guarded(self._reader.read_all)  # raises the error, except for a file truncated between blocks
            raise ValueError(
                f"{path} is damaged, or not an ArrayRecord file: there is no record in its {self._stamp[0]} bytes"
            )

    def each(self) -> Iterator[tuple[int, int, Callable[[], dict[str, Any]]]]:
        total = self._reader.num_records()
        for start in range(0, total, BATCH):
            records = self._guarded(lambda start=start: self._reader.read(start, min(start + BATCH, total)))
            for index, record in enumerate(records, start):
                yield index + 1, index, lambda record=record: self._parse(record)

    def at(self, position: int) -> dict[str, Any]:
        with open(paths.local(self._path), "rb") as file:
            check_unchanged(file, self._stamp, self._path)
        (record,) = self._guarded(lambda: self._reader.read([position]))
        return self._parse(record)

    def place(self, number: int) -> str:
        return f"{self._path}, record {number}"

    def digest(self) -> str:
        return self._digest

    def counts(self) -> dict[str, int]:
        return {}

    def _guarded(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (RuntimeError, IndexError, ValueError) as error:
            raise ValueError(f"{self._path} is damaged, or not an ArrayRecord file: {str(error)[:200]}") from error
