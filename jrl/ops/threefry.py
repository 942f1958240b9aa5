"""Threefry-2x32 with 20 rounds, unrolled so that it fuses with its consumer.

`jax.random.bits` computes two words for each one it returns and runs its rounds as a loop on CPU, which takes a fifth
of a decode step of a small model. The generator is the same, its counters are not.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Returns two words of random bits for two words of key and two of counter, all uint32 of one shape."""
    schedule = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = counter[0] + schedule[0], counter[1] + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation))) ^ x
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def random_bits(key: Array, count: int) -> Array:
    """Returns [count] uint32 of random bits.

    Args:
      key: [] typed key of JAX's default kind (two words), consumed.

    Raises:
      ValueError: the key is of another kind.
    """
    words = jax.random.key_data(key)
    if words.shape != (2,):
        raise ValueError(f"draws need a threefry2x32 key (jax.random.key(seed)); got one of {words.shape} words")
    half = (count + 1) // 2
    counter = jnp.arange(half, dtype=jnp.uint32)
    bits = threefry((words[0], words[1]), (counter, jnp.full_like(counter, 0xFFFFFFFF)))
    return jnp.concatenate(bits)[:count]
