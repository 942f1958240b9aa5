"""Content hashes of files and of array leaves: what a save is verified by, and what a fingerprint is made of."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import stat
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jrl import paths
from jrl.device.placement import fetch

_CHUNK = 1 << 20


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


def key_data(leaf: Any) -> Any:
    """Returns the uint32 data of typed keys, and any other leaf as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def array_digest(dtype: str, shape: tuple[int, ...], data: np.ndarray) -> str:
    """Returns sha256 (hex) of dtype, shape and the row-major bytes of `data`, which may be the data of keys."""
    digest = hashlib.sha256(f"{dtype} {list(shape)}\n".encode())
    digest.update(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
