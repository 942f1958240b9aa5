"""Sums over the sequences of packed rows, row by row.

`segment` gives each token's sequence in its row, 0..S-1, and S for padding. Every function compares it with 0..S-1 and
reduces along the row: the comparison fuses into the reduction, nothing crosses rows, and rows may be sharded (a
`segment_sum` over sharded rows is refused under explicit axes, and would be a collective).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def segment_sum(x: Array, mask: Array, segment: Array, *, num_segments: int) -> Array:
    """Returns the sum of `x` over the masked tokens of each sequence; 0 for a sequence without any.

    Args:
      x: [..., L] float; masked entries may be NaN. mask: [..., L] bool. segment: [..., L] int32.

    Returns:
      [..., S] float32 or wider, S = num_segments.
    """
    member = _membership(segment, num_segments)
    return jnp.sum(jnp.where(member, reduce.masked(x, mask)[..., None, :], 0), axis=-1)


def segment_mean(x: Array, mask: Array, segment: Array, *, num_segments: int) -> Array:
    """Returns the mean of `x` over the masked tokens of each sequence, [..., S]; 0 for a sequence without any."""
    total = segment_sum(x, mask, segment, num_segments=num_segments)
    return total / jnp.maximum(segment_count(mask, segment, num_segments=num_segments), 1)


def segment_count(mask: Array, segment: Array, *, num_segments: int) -> Array:
    """Returns how many tokens of each sequence are in the mask, [..., S] int32."""
    return jnp.sum(_membership(segment, num_segments) & mask[..., None, :], axis=-1)


def segment_start(mask: Array, segment: Array, *, num_segments: int) -> Array:
    """Returns the column of the first token of each sequence in the mask, [..., S] int32; L for a sequence without
    any."""
    column = jnp.broadcast_to(jnp.arange(mask.shape[-1], dtype=jnp.int32), mask.shape)[..., None, :]
    return jnp.min(jnp.where(_membership(segment, num_segments) & mask[..., None, :], column, mask.shape[-1]), axis=-1)


def first_tokens(count: Array, mask: Array, segment: Array) -> Array:
    """Returns which masked tokens are among the first `count` masked ones of their sequence, [..., L] bool: of P13's
    common length where `count` is the shorter length of a pair.

    Args:
      count: [..., S] int32. mask: [..., L] bool. segment: [..., L] int32.
    """
    place = jnp.cumsum(mask.astype(jnp.int32), axis=-1)  # from 1, over the row
    member = _membership(segment, count.shape[-1]) & mask[..., None, :]
    before = jnp.min(jnp.where(member, place[..., None, :], mask.shape[-1] + 1), axis=-1) - 1  # of earlier sequences
    return mask & (place <= to_tokens(before + count, segment))


def same_unit(unit: Array, mask: Array) -> Array:
    """Returns which masked sequences of a row are of one comparison, [..., S, S] bool.

    Args:
      unit: [..., S] int32. mask: [..., S] bool.
    """
    return (unit[..., :, None] == unit[..., None, :]) & mask[..., :, None] & mask[..., None, :]


def to_tokens(value: Array, segment: Array) -> Array:
    """Returns the entry of `value` of each token's sequence, 0 on padding.

    Args:
      value: [..., S] float, one entry a sequence; an entry no token belongs to may be NaN. segment: [..., L] int32.

    Returns:
      [..., L] float, dtype of `value`.
    """
    member = _membership(segment, value.shape[-1])
    return jnp.sum(jnp.where(member, value[..., :, None], 0), axis=-2)


def following(x: Array, mask: Array, segment: Array) -> tuple[Array, Array]:
    """Returns `x` of the next masked token of the same sequence, [..., L], 0 if there is none; and whether there is
    one, [..., L] bool. Tokens outside the mask are skipped, such as another speaker's turn.

    Args:
      x: [..., L] float; masked entries may be NaN. mask: [..., L] bool. segment: [..., L] int32.
    """
    columns = mask.shape[-1]
    place = jnp.where(mask, jnp.arange(columns, dtype=jnp.int32), columns)
    here_or_after = jax.lax.cummin(place, axis=mask.ndim - 1, reverse=True)
    after = next_column(here_or_after, columns)
    at_next = lambda value: jnp.take_along_axis(value, jnp.minimum(after, columns - 1), axis=-1)
    has_next = mask & (after < columns) & (at_next(segment) == segment)
    return jnp.where(has_next, at_next(reduce.masked(x, mask)), 0), has_next


def next_column(x: Array, fill: int = 0) -> Array:
    """Returns the rows shifted left by one column, [..., L]; `fill` in the last one."""
    return _shifted(x, x.ndim - 1, -1, fill)


def previous_column(x: Array) -> Array:
    """Returns the rows shifted right by one column, [R, L, ...]; 0 (False) in the first one."""
    return _shifted(x, 1, 1, 0)


def _shifted(x: Array, axis: int, places: int, fill: int) -> Array:
    """Returns `x` moved along an axis, `fill` where nothing was, sharded as `x` is. Padded, not joined from slices: jax
    0.12 replicates a slice of one entry, such as the last column of a single row, and joins it to nothing sharded."""
    edges = [(0, 0, 0)] * x.ndim
    edges[axis] = (places, -places, 0)
    return jax.lax.pad(x, jnp.array(fill, x.dtype), edges)


def _membership(segment: Array, num_segments: int) -> Array:
    """Returns whether a token belongs to a sequence, [..., S, L] bool."""
    place = jnp.arange(num_segments, dtype=segment.dtype).reshape((1,) * (segment.ndim - 1) + (num_segments, 1))
    return segment[..., None, :] == place
