"""On-disk cache of a judge's answers by the hash of the request: no answer is paid for twice."""

from __future__ import annotations

import json
import os
import pathlib


class AnswerCache:
    """An append-only JSONL file of valid answers. Must be closed. One process at a time; all but `sync` is used under
    the client's lock.

    An entry is one write. An incomplete last line, left by a kill, is dropped when the file is opened, and an entry
    that does not fit on the disk is truncated away. No half-written entry is ever read.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lines: dict[bytes, tuple[int, int]] = {}  # key -> offset and length of its line
        self._file = open(self.path, "a+b", buffering=0)
        self._end = 0
        try:
            with open(self.path, "rb") as reader:
                for number, line in enumerate(reader, 1):
                    if not line.endswith(b"\n"):
                        break
                    self._note(line, number)
        except ValueError:
            self._file.close()
            raise
        self._file.truncate(self._end)

    def __len__(self) -> int:
        return len(self._lines)

    def recall(self, key: str) -> str | None:
        """Returns the answer to the request with that hash (hex), or None."""
        if (line := self._lines.get(bytes.fromhex(key))) is None:
            return None
        offset, length = line
        return json.loads(os.pread(self._file.fileno(), length, offset))["content"]

    def add(self, key: str, content: str) -> None:
        """Appends an answer, unless the key has one. It survives a crash of the process at once, and of the host after
        `sync`.

        Raises: OSError if the disk is full or gone; the file is then unchanged.
        """
        if bytes.fromhex(key) in self._lines:
            return
        line = json.dumps({"key": key, "content": content}).encode() + b"\n"
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"{self.path}: the disk took {written} of {len(line)} bytes")
        except OSError:
            os.ftruncate(self._file.fileno(), self._end)
            raise
        self._note(line, None)

    def sync(self) -> None:
        """Returns once all answers are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _note(self, line: bytes, number: int | None) -> None:
        try:
            entry = json.loads(line)
            key = bytes.fromhex(entry["key"])
            if not isinstance(entry["content"], str):
                raise TypeError("its content is not a string")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path}, line {number}: not an answer of a judge: {error!r}; delete the file to "
                             "have the judge asked again") from error  # fmt: skip
        self._lines.setdefault(key, (self._end, len(line)))
        self._end += len(line)
