"""Arrays of several processes: `place_on_mesh` puts rows on the devices of all, `fetch` returns a global array on every
host. With one process these are `jax.device_put` and `jax.device_get`.

A process may have no device of a mesh: one that only samples has none of the learner's. Its arrays on that mesh have a
shape but no shards, and other processes send it the values that it fetches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jrl.device.processes import ONE, Processes
from jrl.device.sharding import batch_sharding
from jrl.types import Array, PyTree

_joined: list[Processes] = [ONE]  # the process group of JAX, one per program


def set_joined(processes: Processes) -> None:
    """Sets the group of processes that `fetch` sends values through."""
    _joined[:] = [processes]


@functools.cache
def processes_of(mesh: Mesh) -> frozenset[int]:
    """Returns the indices of the processes that have devices of a mesh."""
    return frozenset(device.process_index for device in mesh.devices.flat)


def is_here(mesh: Mesh) -> bool:
    """Whether this process has a device of a mesh."""
    return mesh.empty or jax.process_index() in processes_of(mesh)


def without_shards(shape: jax.ShapeDtypeStruct) -> Array:
    """Returns an array on a mesh of which this process has no device."""
    return jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, [], dtype=shape.dtype)


def place_on_mesh(x: PyTree, sharding: PyTree) -> PyTree:
    """Returns host arrays, identical on all processes, on the devices: each process places its own shards.

    Args:
      sharding: one sharding for all arrays, or a tree with one for each.
    """
    if all(leaf.is_fully_addressable for leaf in jax.tree.leaves(sharding)):
        return jax.device_put(x, sharding)
    if isinstance(sharding, Sharding):
        return jax.tree.map(lambda leaf: _place_leaf(leaf, sharding), x)
    return jax.tree.map(_place_leaf, x, sharding)


def rows_on_mesh(mesh: Mesh, x: np.ndarray) -> Array:
    """Returns a host array on the devices, its rows sharded over the batch axes."""
    return place_on_mesh(x, batch_sharding(mesh, x.ndim))


def _place_leaf(x: Any, sharding: Sharding) -> Array:
    if not sharding.addressable_devices:
        dtype = x.dtype if isinstance(x, jax.Array) else jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
        return without_shards(jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=sharding))
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)  # already on the devices of all processes
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        # Keys are replicated: their data has one more axis, which `sharding` may not know.
        return jax.random.wrap_key_data(_place_leaf(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    host = np.asarray(jax.device_get(x))
    indices = sharding.addressable_devices_indices_map(host.shape)
    shards = [jax.device_put(host[index], device) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(host.shape, sharding, shards)


def fetch(tree: PyTree) -> PyTree:
    """Returns complete arrays as numpy arrays, on every host. Arrays with shards on other processes are gathered by one
    program, which all processes must call. A process without a device of an array's mesh is sent the values."""
    leaves, structure = jax.tree.flatten(tree)
    processes = _joined[0]
    senders = [_sender(leaf, processes.count) for leaf in leaves]
    for sender in sorted({*senders} - {None}):
        indices = [i for i, leaf_sender in enumerate(senders) if leaf_sender == sender]
        here = is_here(leaves[indices[0]].sharding.mesh)
        values = _fetch_here([leaves[i] for i in indices]) if here else None
        sent = processes.exchange("fetch", values if processes.index == sender else None)[sender]
        for i, value in zip(indices, sent):
            leaves[i] = value
    return _fetch_here(jax.tree.unflatten(structure, leaves))


def _sender(leaf: Any, count: int) -> int | None:
    """Returns the process that sends an array to those without a device of its mesh; None if all have one."""
    if count == 1 or not isinstance(leaf, jax.Array) or not isinstance(leaf.sharding, NamedSharding):
        return None
    owners = processes_of(leaf.sharding.mesh)
    return min(owners) if len(owners) < count else None


def gathered(tree: PyTree) -> PyTree:
    """Returns the tree with arrays that have shards on other processes replicated over their mesh. All processes must
    call it: it dispatches the program that gathers them, without waiting."""
    remote = [leaf for leaf in jax.tree.leaves(tree) if not _is_near(leaf)]
    if not remote:
        return tree
    with jax.set_mesh(remote[0].sharding.mesh):
        gathered_leaves = iter(_gather_program(remote[0].sharding.mesh)(remote))
    return jax.tree.map(lambda leaf: leaf if _is_near(leaf) else next(gathered_leaves), tree)


def _fetch_here(tree: PyTree) -> PyTree:
    return jax.device_get(gathered(tree))


def _is_near(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated


_GATHER: dict[Any, Callable[[Sequence[Array]], Sequence[Array]]] = {}


def _gather_program(mesh: Any) -> Callable[[Sequence[Array]], Sequence[Array]]:
    if mesh not in _GATHER:
        everywhere = NamedSharding(mesh, PartitionSpec())
        _GATHER[mesh] = jax.jit(lambda leaves: [jax.sharding.reshard(leaf, PartitionSpec()) for leaf in leaves],
                                out_shardings=everywhere)  # fmt: skip
    return _GATHER[mesh]
