"""Every rollout of a run, in columns: RUN/rollouts holds one zarr array for each field, and the text.

A field is an array [rows, ...]. Texts are two arrays: NAME.bytes [total] uint8, UTF-8 one after another, and NAME.end
[rows] int64, where each row's text ends. `index.json` names the fields and how many rows are whole.

Rows wait in memory until `commit`, or until there are many: a write costs about 20 ms however much it holds. What a
killed run had not committed is drawn again after a resume, so nothing is lost; a checkpoint records the committed
count, and opening at that count drops whatever came after it.

Several processes append at once without waiting for each other: the first writer's arrays are in the folder itself,
those of writer k in its subfolder `writer-k`. A `Snapshot` is the rows that all of them have committed at one moment,
one writer's after the other's; what is appended meanwhile changes nothing in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from jrl import paths

FORMAT = 1
TEXTS = ("prompt", "completion", "example_id")
LOCK = ".__lock"  # TensorStore's, after the name of the file that it writes
WRITER = "writer-"  # before the number of a writer beside the first, in the name of its folder
# A file for each chunk: of narrow columns many rows, so that a large store is not a great many files.
_CHUNK_ROWS, _MOST_CHUNK_ROWS, _CHUNK_BYTES = 256, 4096, 1 << 18
_FLUSH_BYTES = 64 << 20  # most memory that waiting rows take


@dataclasses.dataclass(frozen=True)
class RolloutStore:
    """An open store. `append` is below; `commit()` writes what waits and returns the number of rows on disk."""

    append: Callable[..., None]
    commit: Callable[[], int]
    close: Callable[[], None]
    columns: Callable[[], set[str]]  # of the rows that it has; empty: none


def open_rollouts(folder: str | os.PathLike[str], *, rows: int, writer: int = 0, writers: int = 1) -> RolloutStore:
    """Opens the store at `rows` committed rows of this writer, and drops the rows after them. 0 starts an empty one.

    Args:
      writer: 0 to writers - 1, one for each process that appends. What earlier runs of more writers left is removed by
        the first.

    The returned `append(step, fields, prompts, completions, ids, uids)` takes one whole step:
      fields: name -> [N, ...] with N rows or more (padding rows at the end are dropped), or one value for all rows.
        Every step brings the same fields; a second axis may be narrower (filled with 0) or wider than before.
      prompts, completions: N texts.
      ids, uids: example ids, and [., 2] uint32 visits: one a row, or one a prompt, spread by fields["group"].
    Raises ValueError where the folder holds less than `rows`, or a chunk that is appended to is damaged; where a step
    does not fit the columns.
    """
    if not 0 <= writer < writers:
        raise ValueError(f"writer {writer} of {writers}")
    root = writer_folder(folder, writer)
    if writer == 0:
        for number in other_writers(root):
            if number >= writers:
                paths.remove_tree(writer_folder(folder, number))
    if rows == 0:
        _remove(root)
        index: dict[str, Any] = {"format": FORMAT, "rows": 0, "fields": {}, "complete": True}
    else:
        index = _read_index(root)
        if index["rows"] < rows:
            raise ValueError(f"{root} holds {index['rows']} rollouts but the checkpoint committed {rows}; it was cut")
        check_last_chunks(root, index, rows)
    paths.make_dir(root)
    remove_locks(root)
    index["rows"] = rows
    _write_index(root, index)
    arrays = {name: _open(root, name, index) for name in _array_names(index)} if rows else {}
    ends = {name: int(arrays[f"{name}.end"][rows - 1].read().result()) if rows else 0 for name in TEXTS}
    arrays = _resized(arrays, rows, ends)
    waiting: list[tuple[dict[str, np.ndarray], dict[str, list[bytes]]]] = []
    waiting_rows = waiting_bytes = 0
    closed = False

    def append(
        step: int,
        fields: Mapping[str, Any],
        prompts: Sequence[str],
        completions: Sequence[str],
        ids: Sequence[str],
        uids: np.ndarray,
    ) -> None:
        nonlocal waiting_rows, waiting_bytes
        if closed:
            raise ValueError(f"the rollout store {root} was closed")
        columns = _columns(step, fields, prompts, completions, ids, uids)
        if not index["fields"]:
            index["fields"] = {name: _layout(value) for name, value in columns[0].items()}
        _check(index["fields"], columns[0])
        waiting.append(columns)
        waiting_rows += len(completions)
        waiting_bytes += sum(column.nbytes for column in columns[0].values())
        if waiting_bytes > _FLUSH_BYTES:
            commit()

    def commit() -> int:
        nonlocal arrays, ends, waiting_rows, waiting_bytes
        if waiting_rows:
            stop = index["rows"] + waiting_rows
            batch, new_ends = _joined(index["fields"], waiting, ends)
            try:
                arrays = _write(arrays or _create(root, index), batch, stop, new_ends)
                _write_index(root, {**index, "rows": stop})
            except (OSError, ValueError) as error:
                # TensorStore reports a full disk as ValueError. The rows still wait, so a later commit may succeed.
                raise OSError(
                    f"{waiting_rows} rollouts could not be written to {root}: {paths.cause(error)}"
                ) from error
            index["rows"], ends = stop, new_ends
            waiting.clear()
            waiting_rows = waiting_bytes = 0
        return index["rows"]

    def close() -> None:
        nonlocal closed
        if not closed:
            commit()
            closed = True

    return RolloutStore(append=append, commit=commit, close=close, columns=lambda: set(index["fields"]))


def writer_folder(folder: str | os.PathLike[str], writer: int) -> Path:
    """Returns where a writer's arrays are."""
    return paths.local(folder) / f"{WRITER}{writer}" if writer else paths.local(folder)


def other_writers(root: Path) -> list[int]:
    """Returns the numbers of the writers beside the first that a store has."""
    names = (name.removeprefix(WRITER) for name in paths.list_dir(root) if name.startswith(WRITER))
    return sorted(int(name) for name in names if name.isdigit())


def _remove(root: Path) -> None:
    """Removes a writer's arrays, and not those of others."""
    for name in paths.list_dir(root):
        if not name.startswith(WRITER):
            (paths.remove_tree if (root / name).is_dir() else paths.remove_file)(root / name)


def remove_locks(root: Path) -> None:
    """Removes the lock files that a killed run left, of one writer.

    TensorStore writes a file under its lock's name and renames it. It writes over a lock that it finds without cutting
    it, so that a shorter file would keep the end of a longer one. Whoever opens a store to write holds the run.
    """
    for name in list(paths.files_below(root)):
        if name.endswith(LOCK) and not str(name).startswith(WRITER):
            paths.remove_file(root / name)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The rows that every writer of a store had committed when it was taken, one writer's after the other's."""

    parts: tuple[tuple[Path, dict[str, Any]], ...]  # of every writer with rows, its folder and index

    @property
    def rows(self) -> int:
        return sum(index["rows"] for _, index in self.parts)

    def read(self, start: int = 0, stop: int | None = None, only: Collection[str] | None = None) -> dict[str, Any]:
        """Returns rows `start` to `stop` (None: all): arrays by field, and lists of str for prompt, completion,
        example_id. only: the names of those that are read; None: all of them.

        Raises: ValueError where the rows are not in it, or a chunk of them is damaged or missing.
        """
        stop = self.rows if stop is None else stop
        if not 0 <= start <= stop <= self.rows:
            raise ValueError(f"rows {start} to {stop} are not in {self.parts[0][0]}, which holds {self.rows}")
        found, first = [], 0
        for root, index in self.parts:
            low, high = max(start - first, 0), min(stop - first, index["rows"])
            if low < high:
                try:
                    found.append(_read(root, index, low, high, only))
                except ValueError as error:  # TensorStore's, which says more than a reader needs
                    raise ValueError(f"{root} is damaged: {_first_line(error)}. `jrl doctor` names every damaged file; "
                                     "put back good copies of them") from error  # fmt: skip
            first += index["rows"]
        if not found:
            fields = self.parts[0][1]["fields"]
            empty = {name: np.zeros((0, *shape), dtype) for name, (dtype, shape) in fields.items()}
            every = {**empty, **{name: [] for name in TEXTS}}
            return every if only is None else {name: every[name] for name in only}
        return found[0] if len(found) == 1 else _together(found)


def snapshot(folder: str | os.PathLike[str]) -> Snapshot:
    """Returns the whole rows of a store, which runs may be writing.

    Raises: ValueError where there is no store, or its writers have different fields.
    """
    root = paths.local(folder)
    numbers = other_writers(root) if root.is_dir() else []
    folders = [writer_folder(folder, number) for number in (0, *numbers)]
    # A writer that begins has a folder before it has an index.
    begun = [one for one in folders if paths.exists(one / "index.json")] or folders[:1]
    every = [(one, _read_index(one)) for one in begun]
    parts = [part for part in every if part[1]["rows"]] or every[:1]
    for one, index in parts[1:]:
        if different := sorted(index["fields"].keys() ^ parts[0][1]["fields"].keys()):
            raise ValueError(f"{one} and {parts[0][0]} have different fields: {', '.join(different)}")
    return Snapshot(tuple(parts))


def read_rollouts(folder: str | os.PathLike[str], start: int = 0, stop: int | None = None) -> dict[str, Any]:
    """Returns rows of a store as it is now: see Snapshot.read."""
    return snapshot(folder).read(start, stop)


def _read(
    root: Path, index: dict[str, Any], start: int, stop: int, only: Collection[str] | None = None
) -> dict[str, Any]:
    """Returns rows of one writer, at least one."""
    wanted = lambda names: [name for name in names if only is None or name in only]
    texts = wanted(TEXTS)
    parts = [f"{name}.{part}" for name in texts for part in ("end", "bytes")]
    arrays = {name: _open(root, name, index) for name in [*wanted(index["fields"]), *parts]}
    fields = {name: arrays[name][start:stop].read() for name in wanted(index["fields"])}
    result: dict[str, Any] = {name: value.result() for name, value in fields.items()}
    for name in texts:
        first = max(start - 1, 0)
        ends = arrays[f"{name}.end"][first:stop].read().result()
        bounds = ends if start else np.concatenate([[0], ends])
        data = arrays[f"{name}.bytes"][int(bounds[0]) : int(bounds[-1])].read().result().tobytes()
        marks = (bounds - bounds[0]).tolist()
        result[name] = [data[a:b].decode() for a, b in itertools.pairwise(marks)]
    return result


def _together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the rows of several writers, narrow ones filled with 0."""
    result: dict[str, Any] = {}
    for name, first in parts[0].items():
        values = [part[name] for part in parts]
        if name in TEXTS:
            result[name] = [text for texts in values for text in texts]
            continue
        if first.ndim > 1:
            width = max(value.shape[1] for value in values)
            values = [_widened(value, width) for value in values]
        result[name] = np.concatenate(values)
    return result


def _widened(value: np.ndarray, width: int) -> np.ndarray:
    """Returns an array with 0 in the columns of its second axis that it lacks."""
    return np.pad(value, [(0, 0), (0, width - value.shape[1]), *[(0, 0)] * (value.ndim - 2)])


class Chunk(NamedTuple):
    """A file of the store: a stretch of one array."""

    name: str  # "reward/c/0", below the store's folder
    first: int  # of the entries of the array (rows; bytes of a text), along the first axis
    last: int
    bytes: int | None  # of the file; None: there is none
    where: tuple[slice, ...]

    @property
    def described(self) -> str:
        return f"{self.name} (entries {self.first} to {self.last})"


def lost_chunks(folder: str | os.PathLike[str]) -> list[str]:
    """Returns the chunks of a store whose files are missing or empty, described. Reads none of them, so that it takes
    no longer for larger ones; `read_every_chunk` finds what else may be wrong.

    Raises: ValueError where there is no store, or an array of it cannot be opened.
    """
    return [
        chunk.described
        for root, index in snapshot(folder).parts
        for _, chunk in _stored_chunks(paths.local(folder), root, index)
        if not chunk.bytes
    ]


def read_every_chunk(folder: str | os.PathLike[str]) -> tuple[int, list[str]]:
    """Returns how many chunks a store has, after reading each, and those that are damaged or missing, described, with
    the reason. An array that cannot be opened counts as one.

    Raises: ValueError where there is no store.
    """
    count, damaged = 0, []
    for root, index in snapshot(folder).parts:
        for name in _array_names(index) if index["rows"] else ():  # arrays are made with the first rows
            try:
                for array, chunk in _stored_chunks(paths.local(folder), root, index, name):
                    count += 1
                    try:
                        array[chunk.where].read().result()
                    except ValueError as error:
                        damaged.append(f"{chunk.described}: {_reason(error)}")
            except ValueError as error:
                count += 1
                damaged.append(f"{(root / name).relative_to(paths.local(folder))}: {_reason(error)}")
    return count, damaged


def check_last_chunks(root: Path, index: dict[str, Any], rows: int) -> None:
    """Raises ValueError where the chunk that holds the end of the first `rows` rows is damaged, of any array: the next
    rows are written into it."""
    for name in _array_names(index) if rows else ():
        try:
            last = rows - 1
            if name.endswith(".bytes"):
                last = int(_open(root, f"{name.removesuffix('bytes')}end", index)[last].read().result()) - 1
            if last >= 0:
                _open(root, name, index)[last].read().result()
        except ValueError as error:
            raise ValueError(
                f"{root / name} is damaged where the next rollouts are written: {_reason(error)}"
            ) from error


def _stored_chunks(
    store: Path, root: Path, index: dict[str, Any], only: str | None = None
) -> Iterator[tuple[Any, Chunk]]:
    """Yields every chunk that a writer's arrays must have, with its array. An older store leaves out chunks of zeros,
    and an array that was widened those of narrow rows: of these, only chunks that are there."""
    for name in _array_names(index) if only is None else [only]:
        array, every = _open_all(root, name, index)
        size = array.chunk_layout.read_chunk.shape
        sizes = _sizes(root / name / "c")
        for place in itertools.product(*(range(-(-length // step)) for length, step in zip(array.shape, size))):
            where = tuple(slice(i * n, min((i + 1) * n, length)) for i, n, length in zip(place, size, array.shape))
            file = "/".join(map(str, place))
            if every or file in sizes:
                chunk = f"{(root / name / 'c').relative_to(store)}/{file}"
                yield array, Chunk(chunk, where[0].start, where[0].stop - 1, sizes.get(file), where)


def _sizes(folder: str | os.PathLike[str], below: str = "") -> dict[str, int]:
    """Returns the bytes of the files below a folder by their names, from one listing of each folder: a large store has
    so many files that it is slow to look for each of them."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                sizes |= _sizes(entry.path, f"{below}{entry.name}/")
            elif entry.is_file():
                with contextlib.suppress(FileNotFoundError):  # a temporary file of a writer
                    sizes[below + entry.name] = entry.stat().st_size
    return sizes


def _reason(error: Exception) -> str:
    """Returns the first line of what TensorStore says, without the place in its source."""
    text = _first_line(error)
    return "the chunk is missing" if text.startswith("NOT_FOUND") else text


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0].split(" [", 1)[0]


def _columns(step, fields, prompts, completions, ids, uids) -> tuple[dict[str, np.ndarray], dict[str, list[bytes]]]:
    rows = len(completions)
    if len(prompts) != rows:
        raise ValueError(f"{len(prompts)} prompts and {rows} completions; a row has one of each")
    columns = {"step": np.full(rows, step, np.int32)}
    for name, value in fields.items():
        if value is None:
            continue
        value = np.asarray(value)
        if value.dtype == object or name in (*TEXTS, "step", "uid"):
            raise ValueError(f"field {name!r} of a rollout is an object array or has a name that the store uses")
        if value.ndim and len(value) < rows:
            raise ValueError(f"field {name!r} of a rollout has {len(value)} rows, its texts {rows}")
        columns[name] = np.array(value[:rows] if value.ndim else np.broadcast_to(value, (rows,)))
    group = columns.get("group")

    def spread(values):
        if len(values) == rows or group is None or not (rows and 0 <= group.min() and group.max() < len(values)):
            return values  # one a row already, or refused below
        return [values[g] for g in group]

    columns["uid"] = np.asarray(spread(np.asarray(uids, np.uint32)), np.uint32).reshape(-1, 2)
    texts = {"prompt": prompts, "completion": completions, "example_id": spread(ids)}
    for name, values in (*texts.items(), ("uid", columns["uid"])):
        if len(values) != rows:
            raise ValueError(f"{len(values)} {name}s for {rows} rollouts; give one a row or one a prompt")
    # A lone surrogate, which no tokenizer here makes, is written as '?' rather than losing the step.
    return columns, {name: [text.encode("utf-8", "replace") for text in values] for name, values in texts.items()}


def _check(layouts: dict[str, Any], columns: dict[str, np.ndarray]) -> None:
    if missing := layouts.keys() ^ columns.keys():
        raise ValueError(f"a step of rollouts must bring the fields of the first; {sorted(missing)} differ")
    for name, value in columns.items():
        dtype, shape = layouts[name]
        if str(value.dtype) != dtype or value.ndim - 1 != len(shape) or list(value.shape[2:]) != list(shape[1:]):
            raise ValueError(f"field {name!r} is {value.dtype}{list(value.shape[1:])}, the store has {dtype}{shape}")


def _joined(layouts, waiting, ends) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Returns the waiting steps as one batch by array name, narrow steps filled with 0, and where the texts end."""
    batch: dict[str, np.ndarray] = {}
    for name in layouts:
        parts = [columns[name] for columns, _ in waiting]
        if parts[0].ndim > 1:
            width = max(part.shape[1] for part in parts)
            parts = [_widened(part, width) for part in parts]
        batch[name] = np.concatenate(parts)
    for name in TEXTS:
        texts = [text for _, by_name in waiting for text in by_name[name]]
        batch[f"{name}.bytes"] = np.frombuffer(b"".join(texts), np.uint8)
        batch[f"{name}.end"] = ends[name] + np.cumsum([len(text) for text in texts], dtype=np.int64)
    return batch, {name: int(batch[f"{name}.end"][-1]) for name in TEXTS}


def _write(arrays, batch: dict[str, np.ndarray], stop: int, ends: dict[str, int]) -> dict[str, Any]:
    """Extends every array and writes the batch at its end. Returns the arrays at their new size."""
    arrays = _resized(arrays, stop, ends, {name: value.shape[1] for name, value in batch.items() if value.ndim > 1})
    writes = []
    for name, value in batch.items():
        first = arrays[name].shape[0] - len(value)
        target = arrays[name][first:]
        writes.append((target[:, : value.shape[1]] if value.ndim > 1 else target).write(value))
    for write in writes:
        write.result()
    return arrays


def _layout(value: np.ndarray) -> list[Any]:
    return [str(value.dtype), list(value.shape[1:])]


def _array_names(index: dict[str, Any]) -> list[str]:
    return [*index["fields"], *(f"{name}.{kind}" for name in TEXTS for kind in ("bytes", "end"))]


def _spec(index: dict[str, Any], name: str) -> tuple[str, list[int], int]:
    if name.endswith(".bytes"):
        return "uint8", [], _CHUNK_BYTES
    dtype, shape = ("int64", []) if name.endswith(".end") else index["fields"][name]
    row_bytes = np.dtype(dtype).itemsize * int(np.prod([max(width, 1) for width in shape]))
    return dtype, shape, min(max(_CHUNK_BYTES // row_bytes, _CHUNK_ROWS), _MOST_CHUNK_ROWS)


def _create(root: Path, index: dict[str, Any]) -> dict[str, Any]:
    futures = {}
    for name in _array_names(index):
        dtype, shape, chunk = _spec(index, name)
        grid = {"name": "regular", "configuration": {"chunk_shape": [chunk, *(max(d, 1) for d in shape)]}}
        metadata = {
            "shape": [0, *shape],
            "data_type": dtype,
            "chunk_grid": grid,
            # The first is the default, which tensorstore before 0.1.86 does not fill in. The last one's checksum makes
            # a damaged chunk an error of whoever reads it.
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "zstd", "configuration": {"level": 1}},
                {"name": "crc32c"},
            ],
        }
        spec = {"driver": "zarr3", "kvstore": _kvstore(root, name), "metadata": metadata, **_EVERY_CHUNK}
        futures[name] = ts.open(spec, create=True, delete_existing=True)
    return {name: future.result() for name, future in futures.items()}


_EVERY_CHUNK = {"store_data_equal_to_fill_value": True}  # also one of zeros, so that a missing one is noticed


def _open(root: Path, name: str, index: dict[str, Any]):
    return _open_all(root, name, index)[0]


def _open_all(root: Path, name: str, index: dict[str, Any]) -> tuple[Any, bool]:
    """Returns an array, and whether each of its chunks must be there."""
    spec = {"driver": "zarr3", "kvstore": _kvstore(root, name), **_EVERY_CHUNK}
    array = ts.open(spec).result()
    widened = array.ndim > 1 and array.shape[1] > array.chunk_layout.read_chunk.shape[1]
    if widened or not index.get("complete"):  # rows of before lie in fewer chunks; older stores leave out zeros
        return array, False
    return ts.open({**spec, "fill_missing_data_reads": False}).result(), True


def _kvstore(root: Path, name: str) -> dict[str, str]:
    return {"driver": "file", "path": f"{paths.normalize(root / name)}/"}


def _resized(arrays, rows, ends, widths: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Cuts or extends every array to `rows` (texts to their ends) and widens the second axis where asked."""
    futures = {}
    for name, array in arrays.items():
        length = ends[name.removesuffix(".bytes")] if name.endswith(".bytes") else rows
        shape: list[int | None] = [length, *([None] * (array.ndim - 1))]
        if array.ndim > 1 and (widths or {}).get(name, 0) > array.shape[1]:
            shape[1] = widths[name]
        futures[name] = array.resize(exclusive_max=shape)
    return {name: future.result() for name, future in futures.items()}


def _read_index(root: Path) -> dict[str, Any]:
    try:
        index = paths.read_object(root / "index.json")
        if index["format"] != FORMAT:
            raise ValueError(f"format {index['format']}, this version reads {FORMAT}")
        return index
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{root} is not a rollout store: {error}") from error


def _write_index(root: Path, index: dict[str, Any]) -> None:
    paths.write_bytes_atomic(root / "index.json", json.dumps(index, indent=1).encode())
