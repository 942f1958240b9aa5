"""Random access to the rows of a Parquet file. Needs the extra `parquet` (pyarrow). No JAX.

One row group is decoded at a time. Those read last stay decoded, up to KEPT_BYTES together, so the memory of an open
data set is bounded by that, the largest group, BATCH rows, and the footers of its files; in a larger one, most rows in
random order decode their group.
Columns with types that JSON does not have (bytes, times, decimals, maps, structs with a name twice) are skipped and
counted as unread_column. Of a column that has such a type inside, such as a list of messages with a time each, the rest
is read; it is counted as unread_field.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jrl import paths
from jrl.tasks.envs.columns import BadRow
from jrl.tasks.envs.contract import check_unchanged, stamp_of
from jrl.tasks.stopping import Stop, check_stop, never

MAX_GROUP_BYTES = 2 << 30  # of a row group, unpacked
KEPT_BYTES = 1 << 30  # of row groups that stay decoded
BATCH = 1024  # rows turned into Python at once
CHUNK = 1 << 20

_Tables = tuple[tuple[tuple[str, int], Any, int], ...]  # (file, row group), table, bytes; the one read last is first


class Decoded:
    """What stays decoded, of one file or of several that are read as one."""

    def __init__(self) -> None:
        self._tables: _Tables = ()
        self.rows: tuple[str, int, list] = ("", -1, [])  # what was turned into Python last: file, first position, rows

    def table(self, key: tuple[str, int], unpacked: int, read: Callable[[], Any]) -> Any:
        """Returns the table of a row group. read: decodes it, to about `unpacked` bytes."""
        found = next((one for one in self._tables if one[0] == key), None)
        if found is None:
            self._tables = _newest(self._tables, KEPT_BYTES - unpacked)  # free what has no room first: all may be large
            table = read()
            found = key, table, table.nbytes
        self._tables = (found, *(other for other in self._tables if other[0] != key))
        return found[1]


def open_parquet(config: Any, decoded: Decoded, stop: Stop) -> ParquetRows:
    """Returns the rows of a Parquet file. Reads the whole file for its hash, but decodes only the schema.

    Raises: ImportError naming the extra; OSError if it cannot be opened; ValueError if it is not a Parquet file, is
        damaged, has a duplicate column or a row group above MAX_GROUP_BYTES.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "a .parquet file needs the package pyarrow; install it with pip install 'jrl-jax[parquet]'"
        ) from error
    return ParquetRows(config, pyarrow, decoded, stop)


class ParquetRows:
    """The rows of one file. Make one with `open_parquet`."""

    def __init__(self, config: Any, arrow: Any, decoded: Decoded, stop: Stop = never) -> None:
        self._path, self._limit, self._arrow = config.path, config.max_row_bytes, arrow
        self._metadata: Any = None  # the file's footer, parsed once: it grows with the number of row groups
        self._decoded = decoded
        paths.check_not_special(config.path)
        with open(paths.local(config.path), "rb") as file:
            self._stamp = stamp_of(file)
            self._digest = hashlib.sha256()
            while chunk := file.read(CHUNK):
                check_stop(stop, f"reading {config.path}")
                self._digest.update(chunk)
        self._metadata, schema = self._guarded(lambda file: (file.metadata, file.schema_arrow))
        metadata = self._metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        self._bytes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
        if (largest := max(self._bytes, default=0)) > MAX_GROUP_BYTES:
            raise ValueError(
                f"{config.path}: a row group unpacks to {largest} bytes; the limit is {MAX_GROUP_BYTES}. "
                "Write the file with smaller row groups"
            )
        if duplicates := sorted({name for name in schema.names if schema.names.count(name) > 1}):
            raise ValueError(f"{config.path} has two columns named {duplicates[0]!r}")
        self._columns, self._unread = _readable(schema, metadata.schema, arrow)

    def each(self) -> Iterator[tuple[int, int, Callable[[], dict[str, Any]]]]:
        for group in range(len(self._starts) - 1):
            table = self._group(group)
            for start in range(0, table.num_rows, BATCH):
                for i, row in enumerate(_python(table.slice(start, BATCH)), int(self._starts[group]) + start):
                    yield i + 1, i, lambda row=row: self._checked(row)

    def at(self, position: int) -> dict[str, Any]:
        with open(paths.local(self._path), "rb") as file:
            check_unchanged(file, self._stamp, self._path)
        path, start, rows = self._decoded.rows
        if path != self._path or not start <= position < start + len(rows):
            group = int(np.searchsorted(self._starts, position, "right")) - 1
            in_order = path == self._path and position == start + len(rows)
            rows = _python(self._group(group).slice(position - int(self._starts[group]), BATCH if in_order else 1))
            start = position
            self._decoded.rows = self._path, start, rows
        return self._checked(rows[position - start])

    def place(self, number: int) -> str:
        return f"{self._path}, row {number}"

    def digest(self) -> str:
        return self._digest.hexdigest()

    def counts(self) -> dict[str, int]:
        return self._unread

    def _group(self, group: int) -> Any:
        read = lambda: self._guarded(lambda file: file.read_row_group(group, columns=self._columns))
        return self._decoded.table((self._path, group), self._bytes[group], read)

    def _guarded(self, read: Callable[[Any], Any]) -> Any:
        """Returns `read` of the open file. Converts Arrow's errors to a ValueError that names the file."""
        try:
            with self._arrow.parquet.ParquetFile(str(paths.local(self._path)), metadata=self._metadata) as file:
                return read(file)
        except FileNotFoundError:
            raise
        except (self._arrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self._path} is damaged, or not a Parquet file: {error}") from error

    def _checked(self, row: dict[str, Any] | BadRow) -> dict[str, Any]:
        if isinstance(row, BadRow):
            raise row
        if _most_bytes(row) > self._limit and len(json.dumps(row, ensure_ascii=False).encode()) > self._limit:
            raise BadRow("too_long", f"max_row_bytes is {self._limit}")
        return row


def _most_bytes(value: Any) -> int:
    """Returns a bound on the bytes of a value as JSON, far sooner than a long text is written. Raises: BadRow if a
    number is not finite."""
    if isinstance(value, str):
        return 2 + 6 * len(value)  # \u0001
    if isinstance(value, dict):
        return 2 + sum(_most_bytes(name) + _most_bytes(entry) + 4 for name, entry in value.items())
    if isinstance(value, list):
        if {*map(type, value)} <= {int, bool}:  # tokens, perhaps many
            return 2 + 34 * len(value)
        return 2 + sum(_most_bytes(entry) + 2 for entry in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow("not_finite")
    return 32  # -1.7976931348623157e+308


def _newest(tables: _Tables, most: int) -> _Tables:
    """Returns the first row groups that have `most` bytes at most together."""
    totals = itertools.accumulate(size for _, _, size in tables)
    return tables[: sum(total <= most for total in totals)]


def _python(table: Any) -> list[dict[str, Any] | BadRow]:
    """Returns the rows of a table; a BadRow in place of a row with text that is not UTF-8."""
    try:
        return table.to_pylist()
    except UnicodeDecodeError as error:
        if table.num_rows == 1:
            return [BadRow("bad_utf8", f"byte {error.start} of a column")]
        return [row for i in range(table.num_rows) for row in _python(table.slice(i, 1))]


def _readable(schema: Any, leaves: Any, arrow: Any) -> tuple[list[str], dict[str, int]]:
    """Returns what to read of a file: the names of columns whose values convert to JSON types in Python, and of other
    columns the paths of those leaves that do; and the counts of what is left out, by cause.

    Args:
      schema: the Arrow schema.
      leaves: the Parquet schema, which has a column for each leaf, in the same order.
    """
    names: list[str] = []
    counts = {"unread_column": 0, "unread_field": 0}
    first = 0
    for field in schema:
        converts = _leaves_in_json(field.type, arrow)
        if all(converts):
            names.append(field.name)
        else:
            names += [leaves.column(first + i).path for i, one in enumerate(converts) if one]
            counts["unread_field" if any(converts) else "unread_column"] += 1
        first += len(converts)
    return names, {cause: count for cause, count in counts.items() if count}


def _leaves_in_json(type_: Any, arrow: Any) -> list[bool]:
    """Returns of every leaf of an Arrow type whether its values convert to JSON types in Python."""
    types = arrow.types
    if isinstance(type_, arrow.BaseExtensionType):
        return [False] * len(_leaves_in_json(type_.storage_type, arrow))
    if types.is_map(type_):
        return [False] * len([*_leaves_in_json(type_.key_type, arrow), *_leaves_in_json(type_.item_type, arrow)])
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view,
             types.is_large_list_view)  # fmt: skip
    if types.is_dictionary(type_) or any(is_kind(type_) for is_kind in lists):
        return _leaves_in_json(type_.value_type, arrow)
    if types.is_struct(type_):
        fields = [type_.field(i) for i in range(type_.num_fields)]
        is_object = len({field.name for field in fields}) == len(fields)
        return [is_object and one for field in fields for one in _leaves_in_json(field.type, arrow)]
    plain = (types.is_string, types.is_large_string, types.is_string_view, types.is_boolean, types.is_integer,
             types.is_floating, types.is_null)  # fmt: skip
    return [any(is_kind(type_) for is_kind in plain)]
