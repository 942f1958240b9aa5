"""The k-th largest of masked elements, and thresholds in general, by bisection over the bits of a float.

One count a bit and nothing is sorted: rows may be sharded under explicit axes, where a sort along them is refused.
Selections by a threshold keep or drop elements that tie together, so that they do not depend on the order of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def largest_key(holds: Callable[..., Array], keys: Array, *given: Array) -> Array:
    """Returns the largest unsigned integer for which `holds` is true, [] of the keys' dtype; 0 where it is true of
    none.

    Args:
      holds: (number [], keys, *given) -> [] bool, true up to some number and false above it; a function of a module.
      keys: [...] unsigned integers.
    """
    bits, start = jnp.iinfo(keys.dtype).bits, jnp.zeros((), keys.dtype)
    return jax.lax.fori_loop(0, bits, _trying_bits(holds), (start, (keys, *given)))[0]


@functools.cache
def _trying_bits(holds: Callable[..., Array]) -> Callable[[Array, tuple], tuple]:
    """Returns the loop's body, one for each function: outside jit a loop with a new body is compiled again."""

    def try_bit(i: Array, carried: tuple[Array, tuple]) -> tuple[Array, tuple]:
        found, given = carried
        highest = jnp.iinfo(found.dtype).bits - 1
        candidate = found | (jnp.ones((), found.dtype) << (highest - i).astype(found.dtype))
        return jnp.where(holds(candidate, *given), candidate, found), given

    return try_bit


def order_keys(x: Array) -> Array:
    """Returns unsigned integers in the order of `x`, of its size: uint32 for float32, uint64 for float64. NaN has
    no place in it: mask it."""
    x = reduce.widen(x)
    x = jnp.where(x == 0, 0, x)  # -0.0 and 0.0 are equal
    unsigned = jnp.uint64 if x.dtype == jnp.float64 else jnp.uint32
    bits = jax.lax.bitcast_convert_type(x, unsigned)
    sign = jnp.ones((), unsigned) << (jnp.iinfo(unsigned).bits - 1)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def largest(keys: Array, mask: Array, count: Array) -> Array:
    """Returns which masked elements are among the `count` largest, [...] bool; those that tie with the last are all in.

    None where count is below 1; all where there are no more than `count`.

    Args:
      keys: [...] unsigned integers (order_keys of floats). mask: same shape, bool. count: [] number.
    """
    threshold = largest_key(_enough_above, keys, mask, count)
    return mask & (keys >= threshold) & (count >= 1)


def _enough_above(key: Array, keys: Array, mask: Array, count: Array) -> Array:
    return jnp.sum(mask & (keys >= key)) >= count


def share_of(mask: Array, share: float) -> Array:
    """Returns floor(share * elements in the mask), [] float32 or wider, safe from the rounding of a decimal share."""
    return jnp.floor(share * jnp.sum(mask) * (1 + 1e-6))
