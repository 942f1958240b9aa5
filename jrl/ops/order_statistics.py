"""The k-th largest of masked elements, and other thresholds, by bisection over the bits of a float.

One count per bit and no sort: rows may be sharded under explicit axes, where JAX refuses a sort along them. A threshold
keeps or drops all tied elements together, so a selection does not depend on the order of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def largest_key(holds: Callable[..., Array], keys: Array, *given: Array) -> Array:
    """Returns the largest unsigned integer for which `holds` is true, [] of the keys' dtype; 0 if there is none.

    Args:
      holds: (number [], keys, *given) -> [] bool, true up to some number and false above it; a module-level function.
      keys: [...] unsigned integers.
    """
    bits, start = jnp.iinfo(keys.dtype).bits, jnp.zeros((), keys.dtype)
    return jax.lax.fori_loop(0, bits, _trying_bits(holds), (start, (keys, *given)))[0]


@functools.cache
def _trying_bits(holds: Callable[..., Array]) -> Callable[[Array, tuple], tuple]:
    """Returns the loop's body, cached per function: outside jit, a new body object means a recompilation."""

    def try_bit(i: Array, carried: tuple[Array, tuple]) -> tuple[Array, tuple]:
        key, arguments = carried
        highest = jnp.iinfo(key.dtype).bits - 1
        candidate = key | (jnp.ones((), key.dtype) << (highest - i).astype(key.dtype))
        return jnp.where(holds(candidate, *arguments), candidate, key), arguments

    return try_bit


def order_keys(x: Array) -> Array:
    """Returns unsigned integers in the order of `x`, of its size: uint32 for float32, uint64 for float64. NaN has no
    order: mask it."""
    x = reduce.widen(x)
    x = jnp.where(x == 0, 0, x)  # -0.0 and 0.0 are equal
    unsigned = jnp.uint64 if x.dtype == jnp.float64 else jnp.uint32
    bits = jax.lax.bitcast_convert_type(x, unsigned)
    sign = jnp.ones((), unsigned) << (jnp.iinfo(unsigned).bits - 1)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def largest(keys: Array, mask: Array, count: Array) -> Array:
    """Returns which masked elements are among the `count` largest, [...] bool, including ties with the last of them.

    None if count is below 1; all if there are at most `count`.

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
