"""The weights' hash sees every element and no layout."""

import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jrl.device.sharding import MeshShape, make_mesh
from jrl.ops.fingerprint import BLOCK, fingerprint


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_any_changed_swapped_or_renamed_element_changes_it(dtype):
    tree = {"a": jnp.arange(1.0, 13.0, dtype=dtype).reshape(3, 4), "b": jnp.ones(5, dtype)}
    base = int(fingerprint(tree))
    for i, j in np.ndindex(3, 4):
        assert int(fingerprint({**tree, "a": tree["a"].at[i, j].add(1)})) != base
    assert int(fingerprint({**tree, "a": tree["a"][::-1]})) != base
    assert int(fingerprint({"a": tree["a"], "c": tree["b"]})) != base
    assert int(fingerprint(dict(reversed(tree.items())))) == base


def test_an_even_number_of_changed_signs_is_seen():
    x = jnp.array([1.0, 2.0, 3.0, 4.0])
    assert int(fingerprint([x])) != int(fingerprint([-x]))


def test_float64_counts_both_words():
    with jax.enable_x64(True):
        x = jnp.array([1.0, 2.0], jnp.float64)
        assert int(fingerprint([x])) != int(fingerprint([x + jnp.array([2.0**-52, 0])]))


def test_it_does_not_depend_on_the_mesh():
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    expected = int(fingerprint({"w": jnp.asarray(x)}))
    mesh = make_mesh(MeshShape(fsdp=4, tensor=2))
    for spec in (PartitionSpec(), PartitionSpec("fsdp", "tensor"), PartitionSpec("tensor", None)):
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, NamedSharding(mesh, spec))
            assert int(jax.jit(fingerprint)({"w": placed})) == expected


def test_a_device_hashes_what_it_holds_and_no_index_of_the_rest():
    """The index of every element of the whole leaf on every device took 0.6B over fsdp 8 a third of its sampling."""
    mesh = make_mesh(MeshShape(fsdp=4, tensor=2))
    leaf = jax.ShapeDtypeStruct((24, 40), np.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp", "tensor")))
    with jax.set_mesh(mesh):
        text = jax.jit(fingerprint).lower({"w": leaf}).compile().as_text()
    sizes = [np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"u32\[([\d,]+)\]", text)]
    assert max(sizes) == 24 * 40 // 8


def by_definition(name, leaf):
    """The sum that the module's docstring names."""

    def mix(x):
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
        return (x ^ (x >> np.uint32(16))) | np.uint32(1)

    bits = leaf.view({2: np.uint16, 4: np.uint32}[leaf.itemsize]).astype(np.uint32)
    index = np.arange(leaf.size, dtype=np.uint32).reshape(leaf.shape)
    return int(mix(bits * mix(index ^ np.uint32(zlib.crc32(name.encode())))).sum(dtype=np.uint32))


# A block has a part of the first dimension, of the third, or of the last; and all is one.
LARGE = [
    ((8, 10, 30, 50), np.float32),
    ((8, 10, 30, 50), jnp.bfloat16),
    ((4, 4, 60, 1200), np.float16),
    ((4, 40_000), np.float32),
    ((4, 60), np.float16),
]


@pytest.mark.parametrize("shape, dtype", LARGE, ids=str)
def test_a_large_leaf_is_mixed_in_blocks_on_every_mesh(shape, dtype):
    leaf = np.random.default_rng(0).normal(size=shape).astype(dtype)
    leaf.view(f"u{leaf.itemsize}").flat[7] = {2: 0xFFC1, 4: 0xFFC10001}[leaf.itemsize]  # a NaN with bits of its own
    expected = by_definition("['w']", leaf)
    assert int(fingerprint({"w": jnp.asarray(leaf)})) == expected
    mesh = make_mesh(MeshShape(data=2, fsdp=2, tensor=2))
    for spec in ((), ("fsdp",), (("data", "fsdp"),), (None, "tensor"), ("tensor", "fsdp")):
        with jax.set_mesh(mesh):
            placed = jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))
            assert int(jax.jit(fingerprint)({"w": placed})) == expected, spec


@pytest.mark.parametrize("dtype, leaves", [(np.float32, 0), (jnp.bfloat16, 1)])  # the bits of narrow ones
def test_what_is_added_up_is_not_written_down(dtype, leaves):
    leaf = jax.ShapeDtypeStruct((32, 512, 128), dtype)
    program = jax.jit(fingerprint).lower([leaf]).compile()
    sizes = [np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"= u32\[([\d,]+)\]", program.as_text())]
    assert max(sizes) == BLOCK < leaf.size
    blocks = 4 * 4 * BLOCK
    assert program.memory_analysis().temp_size_in_bytes < leaves * leaf.size * leaf.dtype.itemsize + blocks
