"""Arrays from one mesh to another whose devices are others: what publishing weights to a sampler of its own takes.

A shard goes from device to device, not through the host, where source and target cut a dimension into equally many.
Where they do not, a leaf is gathered along that dimension on the source, copied, and cut on the target.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrl.types import Array, PyTree


def transfer(tree: PyTree, mesh: Mesh) -> PyTree:
    """Returns arrays on another mesh, under the same specs. Those that are there already are returned as they are.
    Dispatches and returns at once."""
    return jax.tree.map(lambda x: transfer_leaf(x, mesh), tree)


def transfer_leaf(x: Array, mesh: Mesh) -> Array:
    """Returns what `transfer` does, of one array."""
    source, spec = x.sharding.mesh, x.sharding.spec
    if source == mesh:
        return x
    shared = shared_cuts(spec, source.shape, mesh.shape)
    if shared != spec:
        x = _resharded(x, source, shared)
    x = jax.device_put(x, NamedSharding(mesh, shared))
    return x if shared == spec else _resharded(x, mesh, spec)


def abstract_transfer(tree: PyTree, mesh: Mesh) -> PyTree:
    """Returns shapes as `transfer` would place their arrays. What has no sharding, such as a number, stays so."""

    def place(x: Any) -> Any:
        if not isinstance(getattr(x, "sharding", None), NamedSharding):
            return x
        sharding = NamedSharding(mesh, x.sharding.spec, memory_kind=x.sharding.memory_kind)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, tree)


def replace_leaf(old: Array | None, new: Array, mesh: Mesh) -> Array:
    """Returns `new` on `mesh`, once the memory of `old`, the array in its place, is given back.

    A leaf that must be gathered is waited for, so that of those copies there is one at a time.
    """
    if old is not None:
        old.delete()
    moved = transfer_leaf(new, mesh)
    source = new.sharding
    if shared_cuts(source.spec, source.mesh.shape, mesh.shape) != source.spec:
        jax.block_until_ready(moved)
    return moved


def shared_cuts(spec: PartitionSpec, source: Mapping[str, int], target: Mapping[str, int]) -> PartitionSpec:
    """Returns `spec` without the dimensions that two meshes, given by the size of each axis, cut into unequally many.

    The trailing ones that are not cut are left as they are.
    """
    return PartitionSpec(*(part if cut(part, source) == cut(part, target) else None for part in spec))


def cut(part: Any, sizes: Mapping[str, int]) -> int:
    """Returns into how many a dimension is cut. part: of a PartitionSpec, an axis, several or None."""
    axes = () if part is None else (part,) if isinstance(part, str) else part
    return math.prod(sizes[axis] for axis in axes)


class Publication(NamedTuple):
    """What it takes to publish weights, in bytes of one device."""

    weights: int  # one copy on a device that samples
    received: int  # by a device that samples, each time
    held: int  # copies of the weights there while others come
    learner: int  # the largest leaf as it is gathered on a device that learns; 0 where none has to be
    sampler: int  # the same on a device that samples

    @property
    def peak(self) -> int:
        """On a device that samples."""
        return self.held * self.weights + self.sampler


def publication(
    leaves: Iterable[tuple[int, PartitionSpec]], learner: Mapping[str, int], sampler: Mapping[str, int], held: int
) -> Publication:
    """Returns what publishing takes.

    Args:
      leaves: bytes and cuts of every trained leaf. learner, sampler: the size of every mesh axis.
      held: copies of the weights on the sampler's devices at once.
    """
    weights = received = on_learner = on_sampler = 0
    for size, spec in leaves:
        ways = lambda spec, sizes: math.prod(cut(part, sizes) for part in spec)
        shared = shared_cuts(spec, learner, sampler)
        copied = size // ways(shared, sampler)
        weights += size // ways(spec, sampler)
        received += copied
        if shared != spec:
            on_learner, on_sampler = max(on_learner, copied), max(on_sampler, copied)
    return Publication(weights, received, held, on_learner, on_sampler)


def leaves_of(tree: PyTree) -> list[tuple[int, PartitionSpec]]:
    """Returns bytes and cuts of every array, as `publication` takes them."""
    leaves: Sequence[Any] = jax.tree.leaves(tree)
    return [(math.prod(x.shape) * x.dtype.itemsize, x.sharding.spec) for x in leaves]


def _resharded(x: Array, mesh: Mesh, spec: PartitionSpec) -> Array:
    with jax.set_mesh(mesh):
        return _reshard_program(mesh, spec)(x)


@functools.cache
def _reshard_program(mesh: Mesh, spec: PartitionSpec) -> Any:
    return jax.jit(lambda x: jax.sharding.reshard(x, spec), out_shardings=NamedSharding(mesh, spec))
