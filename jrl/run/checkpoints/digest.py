"""Content hashes of files and of array leaves: what a save is verified by, and what a fingerprint is made of."""

from __future__ import annotations

import concurrent.futures
import hashlib
import math
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jrl import paths
from jrl.device.placement import fetch

_CHUNK = 1 << 20
_BLOCK = 1 << 16  # elements whose checksum is computed at once: the intermediate results fit a cache
Bounds = Sequence[Sequence[int]]  # of every axis [start, stop]


def check_plain_file(path: str | os.PathLike[str]) -> None:
    """Raises ValueError for a link, a folder, a pipe or a device, none of which a save holds: reading one may hang."""
    if not stat.S_ISREG(os.lstat(paths.local(path)).st_mode):
        raise ValueError(f"{os.path.basename(path)} is not a plain file")


def file_digest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns {"sha256": hex, "bytes": int} of a plain file. Raises ValueError for a link, a pipe or a device."""
    target = paths.local(path)
    check_plain_file(target)
    digest, length = hashlib.sha256(), 0
    with open(target, "rb", buffering=0) as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)
            length += len(chunk)
    return {"sha256": digest.hexdigest(), "bytes": length}


def tree_digests(root: str | os.PathLike[str], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns {name: file_digest(root/name)}, hashed by several threads."""
    folder, ordered = paths.local(root), sorted(names)
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(ordered, pool.map(lambda name: file_digest(folder / name), ordered)))


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf (array or ShapeDtypeStruct) holds typed random keys."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def leaf_path(path: tuple[Any, ...]) -> str:
    """Returns a tree path as text: 'params/layers/0/wq'."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns {path: leaf} of a pytree; None is a missing leaf. Raises ValueError where two leaves share a name."""
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = leaf_path(path)
        if name in leaves:
            raise ValueError(f"two leaves of the state are both named {name!r}; rename a dict key that holds a '/'")
        leaves[name] = leaf
    return leaves


def whole_leaf(leaf: Any) -> Any:
    """Returns a leaf as this process holds it whole: gathered, where shards are on other processes."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    if is_key(leaf):
        return jax.random.wrap_key_data(fetch(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    return fetch(leaf)


def leaf_digest(leaf: Any) -> str:
    """Returns `array_digest` of one array, wherever its shards lie. Typed keys hash as their data, with their dtype.

    Raises ValueError for an array with shards on another process.
    """
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(f"an array of shape {leaf.shape} has shards on other processes; gather it before hashing")
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return array_digest(str(leaf.dtype), leaf.shape, np.asarray(jax.device_get(key_data(leaf))))


def local_checksum(data: Any, *, writer: bool) -> int:
    """Returns the part of an array's checksum that this process holds, modulo 2^64: summed over all processes it is

        checksum = sum over elements of mix(bits(element) ^ (index + 1) * odd constant)   modulo 2^64

    index: row-major, in the whole array. A sum has no order, so it is the same however the array is sharded, and no
    process needs another's shards. It finds what is damaged, lost or swapped; it is no defense against an adversary.
    Mix: the finalizer of MurmurHash3.

    Args:
      data: an array of numbers; of keys their data.
      writer: whether this process counts what is not spread over processes, such as numpy arrays, which all hold.
    """
    if not isinstance(data, jax.Array) or (data.is_fully_addressable and jax.process_count() == 1):
        return full_checksum(np.asarray(jax.device_get(data))) if writer else 0
    shards = [shard for shard in data.addressable_shards if shard.replica_id == 0]
    bounds = lambda shard: [part.indices(n)[:2] for part, n in zip(shard.index, data.shape)]
    return sum(checksum(jax.device_get(shard.data), bounds(shard), data.shape) for shard in shards) % 2**64


def full_checksum(array: np.ndarray) -> int:
    """Returns the checksum of an array that this process holds."""
    return checksum(array, [[0, length] for length in array.shape], array.shape)


def checksum(part: np.ndarray, bounds: Bounds, shape: Sequence[int]) -> int:
    """Returns the contribution of a part of an array of some shape to its checksum, as in `local_checksum`."""
    if not part.size:
        return 0
    words = np.ascontiguousarray(part).view(np.dtype(f"u{part.dtype.itemsize}"))
    total = 0
    for block, index in _blocks(words.reshape(-1, words.shape[-1] if words.ndim else 1), bounds, shape):
        x = (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x ^= block
        for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
            x ^= x >> np.uint64(shift)
            x *= np.uint64(factor)
        x ^= x >> np.uint64(33)
        total += int(x.sum(dtype=np.uint64))
    return total % 2**64


def _blocks(words: np.ndarray, bounds: Bounds, shape: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields blocks of a part, whose last dimension is the array's, with the index of every element in the array."""
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    first = np.zeros(1, np.uint64)  # index of the first element of every row
    for (start, stop), stride in zip(bounds[:-1], strides[:-1]):
        places = np.arange(start, stop, dtype=np.uint64) * np.uint64(stride)
        first = (first[:, None] + places).reshape(-1)
    begin, width = (bounds[-1][0] if len(bounds) else 0), words.shape[1]
    columns = min(width, _BLOCK)
    rows = max(1, _BLOCK // columns)
    for row in range(0, len(words), rows):
        for column in range(0, width, columns):
            block = words[row : row + rows, column : column + columns]
            across = np.arange(begin + column, begin + column + block.shape[1], dtype=np.uint64)
            yield block, first[row : row + rows, None] + across


def key_data(leaf: Any) -> Any:
    """Returns the uint32 data of typed keys, and any other leaf as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def array_digest(dtype: str, shape: tuple[int, ...], data: np.ndarray) -> str:
    """Returns sha256 (hex) of dtype, shape and the row-major bytes of `data`, which may be the data of keys."""
    digest = hashlib.sha256(f"{dtype} {list(shape)}\n".encode())
    digest.update(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
