"""A hash of a parameter tree that does not depend on how it is sharded over devices.

    fingerprint = sum over elements of mix(bits(element) * mix(leaf name, global index))   modulo 2^32

A sum modulo 2^32 does not depend on the order, so shards are summed in place. The outer mix is needed because the sign
is the highest bit: with a product alone an even number of sign changes would cancel. The hash detects lost, stale and
swapped weights; it is not cryptographic.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

Array = jax.Array

BLOCK = 2**16  # elements that a CPU mixes at once, so that intermediate results fit its cache


def fingerprint(tree: Any) -> Array:
    """Returns the hash [] uint32 of a tree of floating-point or integer arrays of at most 2^32 elements each. Call it
    under `jax.set_mesh` if leaves are sharded."""
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    names, leaves = [zlib.crc32(name.encode()) for name, _ in named], [leaf for _, leaf in named]
    steps = [_steps(leaf.shape) for leaf in leaves]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return sum(map(_share, names, steps, [jnp.uint32(0)] * len(names), leaves), jnp.uint32(0))
    cuts = [jax.typeof(leaf).sharding.spec for leaf in leaves]
    here = [axis for axis in mesh.axis_names if axis not in mesh.manual_axes]

    def shard_sum(*shares: Array) -> Array:
        total = jnp.uint32(0)
        for name, step, cut, share in zip(names, steps, cuts, shares, strict=True):
            places = [jnp.uint32(0 if axes is None else jax.lax.axis_index(axes)) for axes in cut]
            first = sum(_u32(at, extent, n) for at, extent, n in zip(places, share.shape, step, strict=True))
            # Of devices with the same shard, only one counts.
            copies = [jax.lax.axis_index(axis) for axis in here if axis not in jax.tree.leaves(tuple(cut))]
            total += jnp.where(sum(copies) == 0, _share(name, step, jnp.uint32(first), share), 0)
        return jax.lax.psum(total, here)

    return jax.shard_map(shard_sum, in_specs=tuple(cuts), out_specs=PartitionSpec(), axis_names=set(here))(*leaves)


def leaf_sum(x: Array) -> Array:
    """Returns the hash [] uint32 of one array, without a name."""
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    return _share(0, _steps(x.shape), jnp.uint32(0), x)


def _steps(shape: Sequence[int]) -> list[int]:
    """Returns the stride of each dimension, in elements."""
    return [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]


def _share(name: int, steps: Sequence[int], first: Array, share: Array) -> Array:
    """Returns the contribution of a device's shard of a leaf, [] uint32.

    Args:
      steps: of the whole leaf.
      first: [] uint32, index in the leaf of the share's first element.
    """
    at_once = lambda first, share: _mixed(name, steps, first, share).sum(dtype=jnp.uint32)
    if share.size <= BLOCK:
        return at_once(first, share)
    by_blocks = lambda first, share: _by_blocks(name, steps, first, share)
    # Without blocks a CPU would write all terms of the sum to memory and read them back.
    return jax.lax.platform_dependent(first, share, cpu=by_blocks, default=at_once)


def _by_blocks(name: int, steps: Sequence[int], first: Array, share: Array) -> Array:
    """Returns the same as `_mixed(...).sum()`, computed block by block and summed in place."""
    cut = share.ndim - 1  # a block is a part of this dimension, one index of those before it, and all of those after it
    while math.prod(share.shape[cut:]) <= BLOCK:
        cut -= 1
    before, extent, after = share.shape[:cut], share.shape[cut], share.shape[cut + 1 :]
    part = next(n for n in range(BLOCK // math.prod(after), 0, -1) if extent % n == 0)
    outer, outer_steps = (*before, extent // part), (*steps[:cut], part * steps[cut])
    if share.dtype.itemsize < 4:  # XLA:CPU would carry wider floats through the loop, which lose bits
        share = _bits(share)
    block = after if part == 1 else (part, *after)  # a dimension of size 1 would force a relayout, a copy of the leaf
    blocks = share.reshape(-1, *block)

    def add(i: Array, total: Array) -> Array:
        here, left = first, i.astype(jnp.uint32)
        for count, step in zip(reversed(outer), reversed(outer_steps)):
            here, left = here + _u32(left % jnp.uint32(count), step), left // jnp.uint32(count)
        return total + _mixed(name, steps[len(steps) - len(block) :], here, blocks[i])

    return jax.lax.fori_loop(0, len(blocks), add, jnp.zeros_like(blocks[0], jnp.uint32)).sum(dtype=jnp.uint32)


def _mixed(name: int, steps: Sequence[int], first: Array, share: Array) -> Array:
    """Returns the contribution of every element of `share`, uint32. The first element has the index `first`; `steps`
    are the strides."""
    if share.dtype.itemsize == 8:
        words = jax.lax.bitcast_convert_type(share, jnp.uint32)  # [..., 2]
        bits = words[..., 0] + _u32(words[..., 1], 0x85EBCA6B)
    else:
        bits = _bits(share).astype(jnp.uint32)
    index = first
    for dimension, step in enumerate(steps):
        places = jax.lax.broadcasted_iota(jnp.uint32, share.shape, dimension)
        index = index + _u32(places, step)
    return _mix(bits * _mix(index ^ jnp.uint32(name)))


def _bits(x: Array) -> Array:
    """Returns the bits of numbers of at most 4 bytes as unsigned integers of the same width."""
    return jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])


def _u32(x: Array, *factors: int) -> Array:
    """Returns x times all factors, modulo 2^32."""
    return x * jnp.uint32(math.prod(factors) % 2**32)


def _mix(x: Array) -> Array:
    """Returns odd uint32 that look unrelated for adjacent x. Source: the finalizer of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return (x ^ (x >> 16)) | jnp.uint32(1)
