"""Transfers arrays between meshes of different devices, to publish weights to a sampler with devices of its own.

If source and target cut a dimension into equally many shards, a shard is copied from device to device, not through the
host. If not, a leaf is gathered along that dimension on the source, copied, and cut on the target.

If every process has devices of both meshes, it copies between its own. If the sampler's devices of a process need a
shard that only other processes have, the leaf is gathered in all dimensions. If processes have devices of one mesh
only, such as the hosts of two slices, shards are sent by a program over the devices of both meshes, which all run.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrl.device.placement import processes_of
from jrl.device.sharding import num_shards
from jrl.types import Array, PyTree


def transfer(tree: PyTree, mesh: Mesh) -> PyTree:
    """Returns arrays on another mesh, with the same specs. Arrays that are already on it are returned unchanged.
    Dispatches without waiting."""
    return jax.tree.map(lambda x: transfer_leaf(x, mesh), tree)


def transfer_leaf(x: Array, mesh: Mesh) -> Array:
    """Returns one array on another mesh, as `transfer` does."""
    source, spec = x.sharding.mesh, x.sharding.spec
    if source == mesh:
        return x
    near = x.is_fully_addressable and have_same_processes(source, mesh)
    if not near and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(transfer_leaf(jax.random.key_data(x), mesh), impl=jax.random.key_impl(x))
    shared = copied_cuts(x.shape, spec, source, mesh)
    if shared != spec:
        x = _resharded(x, source, shared)
    x = _copied(x, NamedSharding(mesh, shared))
    return x if shared == spec else _resharded(x, mesh, spec)


def abstract_transfer(tree: PyTree, mesh: Mesh) -> PyTree:
    """Returns shapes with the shardings after `transfer`. Leaves without a sharding, such as numbers, are unchanged."""

    def place(x: Any) -> Any:
        if not isinstance(getattr(x, "sharding", None), NamedSharding):
            return x
        sharding = NamedSharding(mesh, x.sharding.spec, memory_kind=x.sharding.memory_kind)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, tree)


def replace_leaf(old: Array | None, new: Array, mesh: Mesh) -> Array:
    """Returns `new` on `mesh`, after the memory of `old`, which it replaces, has been freed.

    Waits for a leaf that must be gathered, or sent to other processes, so that only one such copy exists at a time.
    """
    if old is not None:
        old.delete()
    moved = transfer_leaf(new, mesh)
    if (
        not have_same_processes(new.sharding.mesh, mesh)
        or copied_cuts(new.shape, new.sharding.spec, new.sharding.mesh, mesh) != new.sharding.spec
    ):
        jax.block_until_ready(moved)
    return moved


@functools.cache
def copied_cuts(shape: tuple[int, ...], spec: PartitionSpec, source: Mesh, target: Mesh) -> PartitionSpec:
    """Returns the spec that an array is copied with: the cuts that both meshes share, or none if a process would need a
    shard that only others have."""
    shared = shared_cuts(spec, source.shape, target.shape)
    if not have_same_processes(source, target):
        return shared
    there, needed = ({(device.process_index, _bounds(index, shape))
                      for device, index in NamedSharding(mesh, shared).devices_indices_map(shape).items()}
                     for mesh in (source, target))  # fmt: skip
    return shared if needed <= there else PartitionSpec()


def shared_cuts(spec: PartitionSpec, source: Mapping[str, int], target: Mapping[str, int]) -> PartitionSpec:
    """Returns `spec` without the dimensions that two meshes, given by the sizes of their axes, cut differently.

    Trailing dimensions that are not cut are unchanged.
    """
    return PartitionSpec(*(part if num_shards(part, source) == num_shards(part, target) else None for part in spec))


def have_same_processes(a: Mesh, b: Mesh) -> bool:
    """Whether the same processes have devices of two meshes."""
    return processes_of(a) == processes_of(b)


class Publication(NamedTuple):
    """The memory for publishing weights, in bytes per device."""

    weights: int  # one copy on a sampler device
    received: int  # by a sampler device, each time
    held: int  # copies of the weights there while new ones arrive
    learner: int  # the largest leaf that is gathered or sent on a learner device; 0: none is
    sampler: int  # the same on a sampler device

    @property
    def peak(self) -> int:
        """The most bytes on a sampler device."""
        return self.held * self.weights + self.sampler


def publication(
    leaves: Iterable[tuple[int, PartitionSpec, PartitionSpec]],
    sampler: Mapping[str, int],
    held: int,
    sent: bool = False,
) -> Publication:
    """Returns the memory for publishing.

    Args:
      leaves: (bytes, spec, spec that it is copied with) of every trained leaf.
      sampler: the size of every axis of its mesh.
      held: copies of the weights on the sampler's devices at once.
      sent: to other processes, by a program that needs as much memory again as it receives.
    """
    weights = received = on_learner = on_sampler = 0
    for size, spec, shared in leaves:
        ways = lambda spec, sizes: math.prod(num_shards(part, sizes) for part in spec)
        copied = size // ways(shared, sampler)
        weights += size // ways(spec, sampler)
        received += copied
        if shared != spec or sent:
            on_learner, on_sampler = max(on_learner, copied), max(on_sampler, copied)
    return Publication(weights, received, held, on_learner, on_sampler)


def _copied(x: Array, sharding: NamedSharding) -> Array:
    """Returns an array on other devices, copied within each process, or sent if meshes have different processes."""
    if not have_same_processes(x.sharding.mesh, sharding.mesh):
        return _sent(x, sharding)
    if x.is_fully_addressable and sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    local = {_bounds(shard.index, x.shape): shard.data for shard in x.addressable_shards}
    indices = sharding.addressable_devices_indices_map(x.shape)
    shards = [jax.device_put(local[_bounds(index, x.shape)], device) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)


def _sent(x: Array, sharding: NamedSharding) -> Array:
    """Returns an array on a mesh of other processes. Every target shard must be a source shard."""
    source, target = x.sharding.mesh, sharding.mesh
    shape, rounds = sharding.shard_shape(x.shape), _rounds(x.shape, x.sharding, sharding)
    joint = _joint(source, target)
    shards = [shard.data for shard in x.addressable_shards]
    local = [device for device in target.devices.flat if device.process_index == jax.process_index()]
    shards += [jax.device_put(np.zeros(shape, x.dtype), device) for device in local]
    # Shards are stacked along the first axis. A scalar is declared replicated, though devices hold different values.
    stacked_shape, over = (), PartitionSpec()
    if shape:
        stacked_shape, over = (shape[0] * joint.size, *shape[1:]), PartitionSpec("device")
    with jax.set_mesh(joint):
        sharded = NamedSharding(joint, over)
        stacked = jax.make_array_from_single_device_arrays(stacked_shape, sharded, shards, dtype=x.dtype)
        sent = _sending_program(joint, over, rounds)(stacked)
    by_device = {shard.device: shard.data for shard in sent.addressable_shards}
    received = [by_device[device] for device in sharding.addressable_devices_indices_map(x.shape)]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, received, dtype=x.dtype)


@functools.cache
def _rounds(
    shape: tuple[int, ...], source: NamedSharding, target: NamedSharding
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Returns rounds of (from, to), indices of the devices of both meshes. A device sends at most once in a round."""
    place = {device: i for i, device in enumerate(_joint(source.mesh, target.mesh).devices.flat)}
    senders: dict[Any, list[int]] = {}
    for device, index in source.devices_indices_map(shape).items():
        senders.setdefault(_bounds(index, shape), []).append(place[device])
    rounds: list[list[tuple[int, int]]] = []
    num_requests = collections.Counter()
    for device, index in target.devices_indices_map(shape).items():
        bounds = _bounds(index, shape)
        round_index, sender = divmod(num_requests[bounds], len(senders[bounds]))
        num_requests[bounds] += 1
        if round_index == len(rounds):
            rounds.append([])
        rounds[round_index].append((senders[bounds][sender], place[device]))
    return tuple(map(tuple, rounds))


@functools.cache
def _joint(source: Mesh, target: Mesh) -> Mesh:
    """Returns a mesh of one axis over the devices of two meshes."""
    return Mesh(np.concatenate([source.devices.flat, target.devices.flat]), ("device",))


@functools.cache
def _sending_program(joint: Mesh, over: PartitionSpec, rounds: tuple[tuple[tuple[int, int], ...], ...]) -> Any:
    def send(shard: Array) -> Array:
        first, *others = [(jax.lax.ppermute(shard, "device", pairs), pairs) for pairs in rounds]
        place, received = jax.lax.axis_index("device"), first[0]
        for arrived, pairs in others:
            is_target = (place == np.array([to for _, to in pairs])).any()
            received = jax.numpy.where(is_target, arrived, received)
        return received

    return jax.jit(jax.shard_map(send, mesh=joint, in_specs=over, out_specs=over, check_vma=False))


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _resharded(x: Array, mesh: Mesh, spec: PartitionSpec) -> Array:
    with jax.set_mesh(mesh):
        return _reshard_program(mesh, spec)(x)


@functools.cache
def _reshard_program(mesh: Mesh, spec: PartitionSpec) -> Any:
    return jax.jit(lambda x: jax.sharding.reshard(x, spec), out_shardings=NamedSharding(mesh, spec))
