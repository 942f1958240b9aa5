"""Copies of weights on devices that should hold the same bits."""

import random

import jax
import jax.numpy as jnp
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


# The shapes, cuts and dtypes of a model's leaves, few of each: every combination is a program of its own.
LEAVES = [
    (np.float32, (4, 6), PartitionSpec("fsdp")),
    (jnp.bfloat16, (8, 2), PartitionSpec()),
    (np.float32, (), PartitionSpec()),
    (np.int32, (5,), PartitionSpec()),
    (np.int8, (4, 4), PartitionSpec(None, "data")),
    (np.uint32, (2, 2), PartitionSpec("data")),
]


def test_any_bit_of_any_copy_of_any_leaf_is_found_and_named(placed, trials):
    mesh, _ = placed
    draw, rng = random.Random(0), np.random.default_rng(0)
    devices = list(mesh.devices.flat)
    for _ in range(trials(10, 500)):
        tree, faulty = {}, draw.randrange(len(LEAVES))
        broken = draw.choice(devices)
        for i, (dtype, shape, cut) in enumerate(LEAVES):
            width = np.dtype(dtype).itemsize
            words = np.dtype(f"u{width}")
            # Any bits that there are, those of NaN, of infinity and of -0.0 too.
            values = rng.integers(0, 256, (*shape, width), np.uint8).view(words).reshape(shape)
            sharding, shards = NamedSharding(mesh, cut), []
            for device, index in sharding.addressable_devices_indices_map(shape).items():
                shard = np.array(values[index], words)
                if i == faulty and device == broken:
                    shard.reshape(-1)[draw.randrange(shard.size)] ^= words.type(1 << draw.randrange(8 * width))
                shards.append(jax.device_put(shard.view(dtype), device))
            tree[f"leaf{i}"] = jax.make_array_from_single_device_arrays(shape, sharding, shards)
        found = differing_replica(tree)
        assert found is not None and found.leaf == f"leaf{faulty}" and broken in (found.device, found.other)
