"""Keys of random draws. A key is a pure function of the identity of what is drawn, never of its position in a batch."""

from __future__ import annotations

import jax

Array = jax.Array


def row_key(key: Array, stream: int | Array, uid: Array, sample: int | Array) -> Array:
    """Returns S2, the key of one sequence: (run seed, stream, visit uid, sample index) folded in that order.

    Args:
      key: [] typed key, the run's root. Not consumed: every name folded into it gives another key.
      stream: [] int32 or uint32, separates train, evaluation and interactive draws.
      uid: [2] uint32, names one visit of one example.
      sample: [] int32, index of the sequence within its prompt's group.

    See docs/algorithms.md, S2. Peers seed a batch, so a row's noise depends on its neighbors; here it does not.
    """
    for name in (stream, uid[0], uid[1], sample):
        key = jax.random.fold_in(key, name)
    return key


def token_key(row_key: Array, position: int | Array) -> Array:
    """Returns the key of the token at `position` ([] int32, its column in the sequence, prompt included) of a row."""
    return jax.random.fold_in(row_key, position)
