"""Checks that devices with the same shard hold the same bits, to detect silent faults of a device or process."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jrl.device.host_memory import HOST, memory_kind
from jrl.device.placement import fetch
from jrl.ops.fingerprint import leaf_sum
from jrl.types import Array, PyTree


class Difference(NamedTuple):
    """Two devices that hold different bits of the same shard of a leaf."""

    leaf: str
    device: Any
    other: Any


def differing_replica(tree: PyTree) -> Difference | None:
    """Returns the first leaf for which two devices with the same shard differ; None if there is none. All processes
    must call it together, under `jax.set_mesh`."""
    named = [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(tree) if memory_kind(x) != HOST and x.size]
    mesh = jax.sharding.get_mesh()
    leaves = [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for _, x in named]
    sums = fetch(_sums(leaves))  # [devices, leaves]; the same in all processes, with or without devices of it
    devices = list(mesh.devices.flat)
    place_of = {device: i for i, device in enumerate(devices)}
    for column, ((path, _), leaf) in enumerate(zip(named, leaves)):
        replicas = collections.defaultdict(list)
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            replicas[str(index)].append(device)
        for first, *others in replicas.values():
            for other in others:
                if sums[place_of[first], column] != sums[place_of[other], column]:
                    name = jax.tree_util.keystr(path, simple=True, separator="/")
                    return Difference(name, first, other)
    return None


@jax.jit
def _sums(leaves: list[Array]) -> Array:
    """Returns a hash of each device's shard of each leaf, [devices, leaves] uint32."""
    mesh = jax.sharding.get_abstract_mesh()
    cuts = tuple(jax.typeof(leaf).sharding.spec for leaf in leaves)
    local = lambda *shards: jnp.stack([leaf_sum(shard) for shard in shards])[None]
    out = PartitionSpec(mesh.axis_names)
    return jax.shard_map(local, in_specs=cuts, out_specs=out, check_vma=False)(*leaves)
