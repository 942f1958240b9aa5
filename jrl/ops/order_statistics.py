"""The k-th largest of masked elements, and thresholds in general, by bisection over the bits of a float.

One count a bit and nothing is sorted: rows may be sharded under explicit axes, where a sort along them is refused.
Selections by a threshold keep or drop elements that tie together, so that they do not depend on the order of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def largest_key(holds: Callable[[Array], Array], dtype: jnp.dtype) -> Array:
    """Returns the largest unsigned integer for which `holds` is true, [] dtype; 0 where it is true of none.

    Args:
      holds: [] dtype -> [] bool, true up to some number and false above it.
    """
    bits = jnp.iinfo(dtype).bits

    def try_bit(i: Array, found: Array) -> Array:
        candidate = found | (jnp.ones((), dtype) << (bits - 1 - i).astype(dtype))
        return jnp.where(holds(candidate), candidate, found)

    return jax.lax.fori_loop(0, bits, try_bit, jnp.zeros((), dtype))


def order_keys(x: Array) -> Array:
    """Returns unsigned integers in the order of `x`, of its size: uint32 for float32, uint64 for float64. No NaN."""
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
    threshold = largest_key(lambda key: jnp.sum(mask & (keys >= key)) >= count, keys.dtype)
    return mask & (keys >= threshold) & (count >= 1)


def share_of(mask: Array, share: float) -> Array:
    """Returns floor(share * elements in the mask), [] float32 or wider, safe from the rounding of a decimal share."""
    return jnp.floor(share * jnp.sum(mask) * (1 + 1e-6))
