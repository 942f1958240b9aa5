"""Arrays of a step whose processes have no folder in common: each writes the shards of its devices into a file.

    ROOT/00000005/shards-1.bin     the shards of process 1, row-major, each at a multiple of ALIGNMENT bytes

The step's manifest has file, offset and bounds of every shard, so any number of processes reads the arrays, on any
mesh. Orbax has no such form: its processes must see one folder, and each must have a device of every array.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

Bounds = list[list[int]]  # of every axis [start, stop]
ALIGNMENT = 64


def write_shards(
    folder: Path, arrays: Mapping[str, Any], process: int
) -> tuple[dict[str, dict[str, Any]], dict[str, list[list[Any]]]]:
    """Writes the shards that this process holds, each that several hold by one of them only. numpy arrays, which all
    processes hold, are written by process 0.

    Returns {file: {"sha256", "bytes"}} of what was in memory, and by leaf [[file, offset, bounds], ...].
    """
    name, offset = f"shards-{process}.bin", 0
    written, placed = hashlib.sha256(), {}
    with open(folder / name, "wb") as file:
        for leaf, array in arrays.items():
            for bounds, data in _shards(array, process):
                data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
                placed.setdefault(leaf, []).append([name, offset, bounds])
                for piece in (data.data, bytes(-data.nbytes % ALIGNMENT)):
                    file.write(piece)
                    written.update(piece)
                    offset += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {name: {"sha256": written.hexdigest(), "bytes": offset}}, placed


def _shards(array: Any, process: int) -> Iterator[tuple[Bounds, np.ndarray]]:
    if not isinstance(array, jax.Array):
        if process == 0:
            yield [[0, length] for length in array.shape], array
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield _bounds(shard.index, array.shape), jax.device_get(shard.data)


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    return [list(part.indices(length)[:2]) for part, length in zip(index, shape)]


def read_shards(
    folder: Path,
    placed: Mapping[str, Sequence[Sequence[Any]]],
    targets: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Returns the arrays that `targets` asks for: numpy arrays for numpy arrays, else arrays of that sharding, of which
    each process reads what its devices hold.

    Args:
      placed: by leaf [[file, offset, bounds], ...].
      files: {file: {"bytes", ...}} of the step: shards are in no others.

    Raises: ValueError where shards are in another file or behind the end of one, are there twice, or have another
      number of elements than an array (its checksum finds what else may be wrong); OSError where a file is missing or
      too short.
    """
    for leaf in targets:
        _check_placed(leaf, placed[leaf], targets[leaf], files)
    return {leaf: _read_leaf(folder, leaf, placed[leaf], target) for leaf, target in targets.items()}


def _check_placed(
    leaf: str, shards: Sequence[Sequence[Any]], target: Any, files: Mapping[str, Mapping[str, Any]]
) -> None:
    size = 0
    for name, offset, bounds in shards:
        count = math.prod(stop - start for start, stop in bounds)
        end = offset + count * np.dtype(target.dtype).itemsize
        within = len(bounds) == len(target.shape) and all(
            0 <= start < stop <= length for (start, stop), length in zip(bounds, target.shape)
        )
        if name not in files or offset < 0 or end > files[name]["bytes"] or not within:
            raise ValueError(f"leaf {leaf} has a shard {bounds} at {offset} of {name!r}, which the step does not hold")
        size += count
    if len({str(bounds) for _, _, bounds in shards}) < len(shards):
        raise ValueError(f"a shard of leaf {leaf} is there twice")
    if size != math.prod(target.shape):
        raise ValueError(f"the shards of leaf {leaf} have {size} elements, and it has {math.prod(target.shape)}")


def _read_leaf(folder: Path, leaf: str, shards: Sequence[Sequence[Any]], target: Any) -> Any:
    read: dict[str, np.ndarray] = {}  # devices may hold the same part

    def part(index: Sequence[slice]) -> np.ndarray:
        bounds = _bounds(index, target.shape)
        if str(bounds) not in read:
            read[str(bounds)] = _assemble(folder, leaf, shards, bounds, np.dtype(target.dtype))
        return read[str(bounds)]

    if isinstance(target, np.ndarray):
        return part([slice(None)] * target.ndim)
    where = target.sharding.addressable_devices_indices_map(target.shape)
    placed = [jax.device_put(part(index), device) for device, index in where.items()]
    return jax.make_array_from_single_device_arrays(target.shape, target.sharding, placed, dtype=target.dtype)


def _assemble(folder: Path, leaf: str, shards: Sequence[Sequence[Any]], bounds: Bounds, dtype: np.dtype) -> np.ndarray:
    result, filled = np.empty([stop - start for start, stop in bounds], dtype), 0
    for name, offset, own in shards:
        common = [[max(a[0], b[0]), min(a[1], b[1])] for a, b in itertools.zip_longest(bounds, own)]
        if any(start >= stop for start, stop in common):
            continue
        shape = [stop - start for start, stop in own]
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        stored = np.memmap(folder / name, np.uint8, mode="r", offset=offset, shape=(count,)).view(dtype).reshape(shape)
        result[_within(common, bounds)] = stored[_within(common, own)]
        filled += int(np.prod([stop - start for start, stop in common], dtype=np.int64))
    if filled != result.size:
        raise ValueError(f"the shards of leaf {leaf} hold {filled} of the {result.size} elements within {bounds}")
    return result


def _within(bounds: Bounds, outer: Bounds) -> tuple[slice, ...]:
    """Returns where a part of an array is in a larger part of it."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(bounds, outer))
