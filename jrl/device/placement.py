"""Arrays of several processes: `place_on_mesh` puts rows on the devices of all, `fetch` returns a global array on every
host. With one process these are `jax.device_put` and `jax.device_get`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jrl.device.sharding import batch_sharding
from jrl.types import Array, PyTree


def place_on_mesh(x: PyTree, sharding: PyTree) -> PyTree:
    """Returns host arrays, which all processes hold alike, on the devices: each process places its own shards.

    Args:
      sharding: one of all arrays, or a tree with that of each.
    """
    if all(one.is_fully_addressable for one in jax.tree.leaves(sharding)):
        return jax.device_put(x, sharding)
    if isinstance(sharding, Sharding):
        return jax.tree.map(lambda leaf: _place_leaf(leaf, sharding), x)
    return jax.tree.map(_place_leaf, x, sharding)


def rows_on_mesh(mesh: Mesh, x: np.ndarray) -> Array:
    """Returns a host array on the devices, its rows sharded over the batch axes."""
    return place_on_mesh(x, batch_sharding(mesh, x.ndim))


def _place_leaf(x: Any, sharding: Sharding) -> Array:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)  # it is on the devices of all processes already
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        # Keys are replicated: their data has one more axis, which `sharding` may not know.
        return jax.random.wrap_key_data(_place_leaf(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    host = np.asarray(jax.device_get(x))
    where = sharding.addressable_devices_indices_map(host.shape)
    shards = [jax.device_put(host[index], device) for device, index in where.items()]
    return jax.make_array_from_single_device_arrays(host.shape, sharding, shards)


def fetch(tree: PyTree) -> PyTree:
    """Returns arrays as numpy arrays of all their rows, on every host. Arrays with shards on other processes are
    gathered by one program, which all processes must call."""
    far = [leaf for leaf in jax.tree.leaves(tree) if not _is_near(leaf)]
    if not far:
        return jax.device_get(tree)
    with jax.set_mesh(far[0].sharding.mesh):
        gathered = iter(_gather_program(far[0].sharding.mesh)(far))
    return jax.device_get(jax.tree.map(lambda leaf: leaf if _is_near(leaf) else next(gathered), tree))


def _is_near(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated


_GATHER: dict[Any, Callable[[Sequence[Array]], Sequence[Array]]] = {}


def _gather_program(mesh: Any) -> Callable[[Sequence[Array]], Sequence[Array]]:
    if mesh not in _GATHER:
        everywhere = NamedSharding(mesh, PartitionSpec())
        _GATHER[mesh] = jax.jit(lambda leaves: [jax.sharding.reshard(leaf, PartitionSpec()) for leaf in leaves],
                                out_shardings=everywhere)  # fmt: skip
    return _GATHER[mesh]
