"""Copies of weights on devices that should hold the same bits."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jrl.device.replicas import differing_replica
from jrl.device.sharding import MeshShape, make_mesh


@pytest.fixture(scope="module")
def placed():
    """Returns what places a tree on a mesh of two copies of two shards, one bit of one copy changed on request."""
    mesh = make_mesh(MeshShape(data=2, fsdp=2), jax.devices()[:4])

    def place(values, cut, broken=None):
        sharding = NamedSharding(mesh, cut)
        shards = []
        for device, index in sharding.addressable_devices_indices_map(values.shape).items():
            shard = values[index].copy()
            if device == broken:
                shard.reshape(-1).view(np.uint32)[1] ^= 1
            shards.append(jax.device_put(shard, device))
        return jax.make_array_from_single_device_arrays(values.shape, sharding, shards)

    with jax.set_mesh(mesh):
        yield mesh, place


VALUES = np.arange(24, dtype=np.float32).reshape(4, 6)


def test_equal_copies_are_no_difference(placed):
    _, place = placed
    key = jax.device_put(jax.random.key(0), NamedSharding(placed[0], PartitionSpec()))
    tree = {"cut": place(VALUES, PartitionSpec("fsdp")), "whole": place(VALUES, PartitionSpec()), "key": key,
            "all": place(VALUES, PartitionSpec("data", "fsdp")), "none": None}  # fmt: skip
    assert differing_replica(tree) is None


@pytest.mark.parametrize("cut", [PartitionSpec("fsdp"), PartitionSpec(), PartitionSpec(None, "data")])
@pytest.mark.parametrize("device", range(4))
def test_one_bit_of_one_copy_is_found_and_named(placed, cut, device):
    mesh, place = placed
    broken = list(mesh.devices.flat)[device]
    found = differing_replica({"good": place(VALUES, cut), "bad": place(VALUES, cut, broken)})
    assert found.leaf == "bad" and broken in (found.device, found.other)


def test_shards_that_only_one_device_holds_have_nothing_to_be_compared_with(placed):
    mesh, place = placed
    assert differing_replica({"x": place(VALUES, PartitionSpec("data", "fsdp"), mesh.devices.flat[0])}) is None
