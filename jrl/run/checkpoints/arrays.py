"""Reads arrays that orbax has written, as one process by itself.

Orbax counts its operations, and its processes wait for each other at each: where one has read more often than another,
the next save hangs. So what a process reads alone, to compare it, is read from the store below: zarr arrays by name in
an OCDBT database, FOLDER/ITEM/manifest.ocdbt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

GROUP_BYTES = 256 << 20  # of arrays that are on the host at a time


def read_arrays(
    folder: Path, entries: Mapping[str, Mapping[str, Any]], group_bytes: int = GROUP_BYTES
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) of arrays, in the order of `entries`.

    Args:
      folder: that orbax has written. entries: {name: data_dtype, data_shape}, as in a step's manifest.
      group_bytes: read together, at least one array.

    Raises: ValueError if an array is missing or has another dtype or shape.
    """
    if not entries:
        return
    items = [path.parent for path in folder.glob("*/manifest.ocdbt")]
    if len(items) != 1:
        raise ValueError(f"{folder.name} has {len(items)} databases of arrays, and one was written")
    context = tensorstore.Context()
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{items[0]}/"}}
    spec = lambda name: {"driver": "zarr3", "kvstore": base | {"path": f"{name.rstrip('/')}/"}}
    group: dict[str, Any] = {}
    group_size = 0
    for place, (name, entry) in enumerate(entries.items(), start=1):
        group[name] = tensorstore.open(spec(name), read=True, open=True, context=context)
        group_size += math.prod(entry["data_shape"]) * np.dtype(entry["data_dtype"]).itemsize
        if place < len(entries) and group_size < group_bytes:
            continue
        reads = {name: opened.result().read() for name, opened in group.items()}
        for name, read in reads.items():
            array, entry = np.asarray(read.result()), entries[name]
            if (str(array.dtype), list(array.shape)) != (entry["data_dtype"], list(entry["data_shape"])):
                raise ValueError(f"leaf {name} was written as {array.dtype}{list(array.shape)}")
            yield name, array
        group, group_size = {}, 0
