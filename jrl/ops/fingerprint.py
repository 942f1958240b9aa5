"""A hash of a parameter tree that does not depend on how it is spread over devices.

    fingerprint = sum over elements of mix(bits(element) * mix(leaf name, global index))   modulo 2^32

A sum modulo 2^32 has no order, so shards may be added up as they lie. The outer mix is there because a sign is the
highest bit, and a product alone would not see an even number of them change. It finds lost, stale and swapped weights;
it is no defence against someone who looks for a collision.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def fingerprint(tree: Any) -> Array:
    """Returns the hash [] uint32 of a tree of floating-point or integer arrays of at most 2^32 elements each."""
    total = jnp.zeros((), jnp.uint32)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        total += _leaf(zlib.crc32(jax.tree_util.keystr(path).encode()), leaf)
    return total


def _leaf(name: int, leaf: Array) -> Array:
    size = leaf.dtype.itemsize
    if size == 8:
        words = jax.lax.bitcast_convert_type(leaf, jnp.uint32)  # [..., 2]
        low, high = words[..., 0], words[..., 1]
        bits = low + high * jnp.uint32(0x85EBCA6B)
    else:
        bits = jax.lax.bitcast_convert_type(leaf, {2: jnp.uint16, 4: jnp.uint32, 1: jnp.uint8}[size]).astype(jnp.uint32)
    index = jnp.zeros((), jnp.uint32)
    for dimension, extent in enumerate(leaf.shape):
        index = index * jnp.uint32(extent) + _places(leaf, dimension)
    return _mix(bits * _mix(index ^ jnp.uint32(name))).sum(dtype=jnp.uint32)


def _places(leaf: Array, dimension: int) -> Array:
    """Returns 0, 1, ... along one dimension of `leaf`, cut over devices as that is: a device computes the index of what
    it holds, not of the whole leaf."""
    kind = jax.typeof(leaf)
    places = jnp.arange(leaf.shape[dimension], dtype=jnp.uint32)
    if not jax.sharding.get_abstract_mesh().empty:
        places = jax.sharding.reshard(places, jax.sharding.PartitionSpec(kind.sharding.spec[dimension]))
    return places.reshape((1,) * dimension + (-1,) + (1,) * (leaf.ndim - dimension - 1))


def _mix(x: Array) -> Array:
    """Returns odd uint32 that look unrelated for neighbouring x. Source: the finaliser of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return (x ^ (x >> 16)) | jnp.uint32(1)
