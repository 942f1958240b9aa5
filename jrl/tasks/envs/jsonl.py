"""Tasks from a file of rows, JSON lines (also as .gz), Parquet or ArrayRecord, with random access, or from several such
files. No JAX.

`columns.py` defines the meaning of a row. Opening reads the file once, row by row, and keeps 16 bytes per row; memory
does not grow with the length of the text. Every problem with a row is one of CAUSES. A bad row is refused with file and
line, or dropped and counted, as configured.
"""

from __future__ import annotations

import array
import dataclasses
import errno
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any, NoReturn, Protocol

import numpy as np

from jrl import paths
from jrl.tasks.envs.array_record import ENDINGS, ArrayRecords
from jrl.tasks.envs.columns import CAUSES, BadRow, Jsonl, counts_text, example_of, kind, names_of
from jrl.tasks.envs.contract import REPEATED_PROMPT, check_unchanged, digest_of, in_range, stamp_of
from jrl.tasks.envs.gzipped import GzipText
from jrl.tasks.envs.parquet import Decoded, open_parquet
from jrl.tasks.envs.shards import Shards
from jrl.tasks.example import Example
from jrl.tasks.shares import is_above
from jrl.tasks.stopping import Stop, check_stop, never

_BOM = b"\xef\xbb\xbf"
_DEEPEST = 64
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)

Row = Callable[[], dict[str, Any]]  # raises BadRow


class FileConfig(Protocol):
    """The config fields that a reader needs."""

    path: str
    max_row_bytes: int


class Reader(Protocol):
    """The rows of one kind of file."""

    def each(self) -> Iterator[tuple[int, int, Row]]:
        """Yields (number in the file, from 1; position for `at`; row) of every row, reading the file once."""

    def at(self, position: int) -> dict[str, Any]:
        """Returns the row at a position. Raises BadRow; ValueError if the file changed since it was opened."""

    def place(self, number: int) -> str:
        """Returns the place of a row for messages: "rows.jsonl, line 3". Of rows that `each` has yielded."""

    def digest(self) -> str:
        """Returns the sha256 of the file. Call it after `each` is exhausted."""

    def counts(self) -> dict[str, int]:
        """Returns counts for the whole file, by cause."""


@dataclasses.dataclass(frozen=True, eq=False)
class JsonlSource:
    """Rows of the file by number. Make one with `open_jsonl`."""

    config: Jsonl
    reader: Reader
    positions: np.ndarray  # [n] uint64, the row's position for the reader
    numbers: np.ndarray  # [n] uint64, its number in the file, from 1
    fingerprint: str
    counts: dict[str, int]
    verifiers: frozenset[str]  # all that rows name

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> Example:
        """Returns the example of row `index`. Raises ValueError if the file changed since it was opened."""
        index = in_range(index, len(self))
        return example_of(self.reader.at(int(self.positions[index])), int(self.numbers[index]), self.config)


def open_jsonl(config: Jsonl, stop: Stop = never) -> JsonlSource:
    """Returns the source. Every row is checked.

    Raises: ValueError if the file cannot be read, a row is bad and `on_bad_row` is "refuse" (naming file and line),
        more than `max_dropped` of the rows are bad, or no row is left; StopRequested if `stop` returns True.
    """
    positions, numbers, ids, prompts = (array.array("Q") for _ in range(4))
    counts: dict[str, int] = {}
    verifiers: set[str] = set()
    first_bad = ""
    try:
        reader = open_reader(config, stop)
        for number, position, row in reader.each():
            check_stop(stop, f"reading {config.path}")
            try:
                example = example_of(row(), number, config)
            except BadRow as bad:
                problem = f"{reader.place(number)}: the row {bad}"
                if config.on_bad_row == "refuse":
                    raise ValueError(f"{problem}. Jsonl.on_bad_row = 'drop' drops and counts such rows") from bad
                counts[bad.cause] = counts.get(bad.cause, 0) + 1
                first_bad = first_bad or problem
                continue
            positions.append(position)
            numbers.append(number)
            ids.append(_short(example.id.encode()))
            prompts.append(_short(example.prompt_digest()))
            verifiers.update(example.verifiers)
    except OSError as error:
        unread = str(error.filename or config.path)  # of several files, the one
        raise ValueError(f"Jsonl.path: {unread!r} cannot be read: {error.strerror or error}") from error
    first, first_of = _first_of_each(ids)
    repeated = np.setdiff1d(np.arange(len(ids)), first)
    if len(repeated):
        problem = f"{reader.place(numbers[int(repeated[0])])}: the row {CAUSES['duplicate_id']}"
        if config.on_bad_row == "refuse":
            earlier = reader.place(numbers[int(first_of[repeated[0]])])
            raise ValueError(f"{problem} ({earlier}). Jsonl.on_bad_row = 'drop' drops and counts such rows")
        counts["duplicate_id"] = len(repeated)
        first_bad = first_bad or problem
    dropped, total = sum(counts.values()), len(ids) + sum(counts.values()) - len(repeated)
    if is_above(dropped, total, config.max_dropped):
        raise ValueError(
            f"{config.path}: {dropped} of {total} rows are bad, more than Jsonl.max_dropped = {config.max_dropped} of "
            f"them: {counts_text(counts)}. The first: {first_bad}"
        )
    if not len(first):
        bad = f" that can be used: {counts_text(counts)}. The first: {first_bad}" if counts else ""
        raise ValueError(f"{config.path} holds no rows{bad}")
    duplicates = len(first) - len(np.unique(np.asarray(prompts, np.uint64)[first]))
    if duplicates:
        counts[REPEATED_PROMPT] = duplicates
    return JsonlSource(
        config=config,
        reader=reader,
        positions=np.asarray(positions, np.uint64)[first],
        numbers=np.asarray(numbers, np.uint64)[first],
        fingerprint=digest_of("jsonl", dataclasses.replace(config, path=names_of(config.path)[0]), reader.digest()),
        counts={**counts, **reader.counts()},
        verifiers=frozenset(verifiers),
    )


def open_reader(config: FileConfig, stop: Stop = never) -> Reader:
    """Returns the reader for a file, or for all that a name with * stands for, which are opened as they are read.

    Raises: OSError if one cannot be opened, ValueError if it is damaged.
    """
    decoded = Decoded()
    files = paths.matches(config.path)
    if "*" not in config.path or files == [config.path]:
        return _open_file(config, decoded, stop)
    if not files:
        raise FileNotFoundError(errno.ENOENT, "no file has such a name", config.path)
    return Shards(_open_file(dataclasses.replace(config, path=file), decoded, stop) for file in files)


def _open_file(config: FileConfig, decoded: Decoded, stop: Stop) -> Reader:
    """Returns the reader for a file by its extension: Parquet, ArrayRecord, or JSON lines.

    Args:
      decoded: where row groups of Parquet files stay.
    """
    if config.path.endswith(".parquet"):
        return open_parquet(config, decoded, stop)
    if config.path.endswith(ENDINGS):
        return ArrayRecords(config.path, lambda record: _parse(record, config.max_row_bytes), stop)
    return Lines(config)


class Lines:
    """JSON lines; the position of a line is its offset in the text. Blank lines at the end of the file are ignored."""

    def __init__(self, config: FileConfig) -> None:
        paths.check_not_special(config.path)
        self._path, self._local, self._limit = config.path, paths.local(config.path), config.max_row_bytes
        self._gzip = GzipText(config.path) if config.path.endswith(".gz") else None
        self._digest = hashlib.sha256()
        self._stamp: tuple[int, int] | None = None

    def each(self) -> Iterator[tuple[int, int, Row]]:
        with self._open(0) as file:
            self._stamp = stamp_of(file)
            blank = 0  # blank lines directly before this one
            for number, offset, line in _lines(file, self._limit, self._digest):
                line = _without_bom(line, offset)
                if not line.strip() and len(line) <= self._limit:
                    blank += 1
                    continue
                for before in range(number - blank, number):
                    yield before, offset, _blank
                blank = 0
                yield number, offset, lambda line=line: _parse(line, self._limit)

    def at(self, position: int) -> dict[str, Any]:
        with self._open(position) as file:
            check_unchanged(file, self._stamp, self._path)
            return _parse(_without_bom(file.readline(self._limit + len(_BOM) + 1), position), self._limit)

    def place(self, number: int) -> str:
        return f"{self._path}, line {number}"

    def _open(self, offset: int) -> IO[bytes]:
        if self._gzip is not None:
            return self._gzip.open(offset)
        file = open(self._local, "rb")
        file.seek(offset)
        return file

    def digest(self) -> str:
        return self._digest.hexdigest()

    def counts(self) -> dict[str, int]:
        return {}


def _parse(line: bytes, max_row_bytes: int) -> dict[str, Any]:
    line = line.rstrip(b"\r\n")
    if len(line) > max_row_bytes:
        raise BadRow("too_long", f"max_row_bytes is {max_row_bytes}")
    if line.startswith(_BOM):
        raise BadRow("bom", "only the file may begin with one")
    if not line.strip():
        _blank()
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise BadRow("bad_utf8", f"byte {error.start} of the line") from error
    # Check the depth before parsing, since the parser recurses. The exact depth is computed only where it could be too
    # large.
    if line.count(b"[") + line.count(b"{") > _DEEPEST and _depth(line) > _DEEPEST:
        raise BadRow("too_deep")
    try:
        row = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse, parse_float=_finite)
    except BadRow:
        raise
    except json.JSONDecodeError as error:
        # Some of Python's messages end with "at", before the place.
        raise BadRow("bad_json", f"{error.msg.removesuffix(' at')} at column {error.colno}{_hint(text)}") from error
    except ValueError as error:  # the only other cause: Python limits the digits of an integer
        digits = sys.get_int_max_str_digits()
        raise BadRow("bad_json", f"an integer has more than {digits} digits; write it as a string") from error
    if not isinstance(row, dict):
        raise BadRow("not_object", f"it is {kind(row)}{_hint(text)}")
    if "\\u" in text:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise BadRow("surrogate") from error
    return row


def _hint(text: str) -> str:
    """Returns what to do about a line that begins an array; "" for others."""
    return "; write one object a line, not an array of them" if text.lstrip().startswith("[") else ""


def _blank() -> NoReturn:
    raise BadRow("blank")


def _without_bom(line: bytes, offset: int) -> bytes:
    """Returns the line at `offset` without the byte order mark that some programs write before the first one."""
    return line.removeprefix(_BOM) if offset == 0 else line


def _lines(file: Any, limit: int, digest: Any) -> Iterator[tuple[int, int, bytes]]:
    """Yields number, offset and bytes of each line; only the first limit + 6 bytes of one longer than that."""
    number, offset = 0, 0
    while line := file.readline(limit + len(_BOM) + 3):
        number += 1
        digest.update(line)
        length, end = len(line), line.endswith(b"\n")
        while not end and (more := file.readline(1 << 16)):
            digest.update(more)
            length, end = length + len(more), more.endswith(b"\n")
        yield number, offset, line
        offset += length


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        raise BadRow("duplicate_key", repr(next(key for key in keys if keys.count(key) > 1)))
    return row


def _refuse(constant: str) -> float:
    raise BadRow("not_finite", constant)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise BadRow("not_finite", digits[:40])
    return value


def _depth(line: bytes) -> int:
    deepest = depth = 0
    for byte in _STRINGS.sub(b"", line):
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


def _first_of_each(digests: array.array) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of the first occurrence of each value, ascending, and for every index that of its first."""
    _, first, inverse = np.unique(np.asarray(digests, np.uint64), return_index=True, return_inverse=True)
    return np.sort(first), first[inverse]


def _short(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")
