"""Draws tokens by a two-level Gumbel race: between fixed blocks of the vocabulary, then inside the winning block.

    block = argmax_j (log sum_{v in block j} exp(logits[v]) + gumbel_j)
    token = argmax_{v in block} (logits[v] + gumbel'_v)

Together the races draw from softmax(logits), since P(v) = P(block) P(v | block). They need noise for V / 128 + 128
entries instead of V. The noise depends only on the key, so two computations of the same logits that differ by rounding
draw the same token unless the two best scores of a race tie up to rounding. With an inverse cumulative sum, in
contrast, rounding anywhere moves every later edge.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops.threefry import random_bits

Array = jax.Array

BLOCK = 128  # the noise depends on it: changing it changes every draw


def race(key: Array, logits: Array) -> tuple[Array, Array, Array]:
    """Returns the scores of both races: ([blocks] and [BLOCK], in the dtype of logits), and the winning block [] int32.

    Args:
      key: [] typed key, consumed.
      logits: [V] float32 or wider; -inf marks tokens that are never drawn.
    """
    vocabulary = logits.shape[-1]
    blocks = -(-vocabulary // BLOCK)
    padded = jnp.pad(logits, (0, blocks * BLOCK - vocabulary), constant_values=-jnp.inf).reshape(blocks, BLOCK)
    top = padded.max(axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0)  # a block that is -inf throughout: exp(-inf - 0) = 0, log 0 = -inf
    mass = jnp.log(jnp.exp(padded - top).sum(axis=-1)) + top[:, 0]
    noise = _gumbel(key, blocks + BLOCK).astype(logits.dtype)
    outer = mass + noise[:blocks]
    block = jnp.argmax(outer).astype(jnp.int32)
    inner = jax.lax.dynamic_index_in_dim(padded, block, keepdims=False) + noise[blocks:]
    return outer, inner, block


def draw(key: Array, logits: Array) -> Array:
    """Returns a token [] int32 drawn from softmax(logits). Rows by `jax.vmap`. Ties go to the lowest index.

    Args:
      key: [] typed key, consumed.
      logits: [V] float32 or wider, not all -inf; an entry of -inf is never drawn.
    """
    _, inner, block = race(key, logits)
    return block * BLOCK + jnp.argmax(inner).astype(jnp.int32)


def greedy(logits: Array) -> Array:
    """Returns the most probable token, int32 [...] of logits [..., V]. Ties go to the lowest index."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _gumbel(key: Array, count: int) -> Array:
    """Returns [count] float32 standard Gumbel noise, -log(-log(u)).

    Always float32, so that a float64 model draws what a float32 model draws. A float32 uniform u has steps of 2^-23, so
    noise above 10 would have a resolution of 0.3 % and a maximum of 16. Here -log(u) is computed from 32 bits with
    log1p, centered in their cell, and the noise reaches 22.9.
    """
    bits = random_bits(key, count)
    # Upper half of the range: 1 - u is exact in 31 bits near u = 1; lower half: u itself is.
    low = bits < jnp.uint32(1 << 31)
    distance = (jnp.where(low, bits, ~bits).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    exponential = jnp.where(low, -jnp.log(distance), -jnp.log1p(-distance))
    return -jnp.log(exponential)
