"""Statistics per group (the samples of one prompt), keyed by group id: rows in any order, with any row missing.

Every row is compared with 0..num_groups-1 and reduced along N; the comparison fuses into the reduction. Under explicit
axes this works on rows sharded over data, where JAX refuses a scatter.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def total(x: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns each group's sum over its valid rows, [num_groups] float32 or wider; 0 for a group without any.

    Args:
      x: [N] float; invalid entries may be NaN. group: [N] int32. valid: [N] bool.
    """
    return jnp.sum(jnp.where(_members(group, num_groups), reduce.masked(x, valid)[:, None], 0), axis=0)


def count(group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns the number of valid rows of each group, [num_groups] int32."""
    return jnp.sum(_members(group, num_groups) & valid[:, None], axis=0)


def mean(x: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns each group's mean over its valid rows, [num_groups]; 0 for a group without any."""
    rows = jnp.maximum(count(group, valid, num_groups=num_groups), 1)
    return total(x, group, valid, num_groups=num_groups) / rows


def maximum(x: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns each group's largest valid value, [num_groups]; -inf for a group without any."""
    counts = _members(group, num_groups) & valid[:, None]
    return jnp.max(jnp.where(counts, reduce.widen(x)[:, None], -jnp.inf), axis=0)


def minimum(x: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns each group's smallest valid value, [num_groups]; +inf for a group without any."""
    return -maximum(-reduce.widen(x), group, valid, num_groups=num_groups)


def first_row(flag: Array, group: Array, *, num_groups: int) -> Array:
    """Returns the index of each group's first row with the flag, [num_groups] int32; N for a group without any.

    Args:
      flag: [N] bool. group: [N] int32.
    """
    flagged = _members(group, num_groups) & flag[:, None]
    rows = flag.shape[0]
    return jnp.min(jnp.where(flagged, jnp.arange(rows, dtype=jnp.int32)[:, None], rows), axis=0)


def first_highest(value: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns the first row of each group with the highest valid value, [N] bool."""
    static = {"num_groups": num_groups}
    high = to_rows(maximum(value, group, valid, **static), group)
    first = first_row(valid & (value == high), group, **static)
    return jnp.arange(value.shape[0], dtype=jnp.int32) == to_rows(first, group)


def first_sample(flag: Array, group: Array, sample: Array, *, num_groups: int) -> Array:
    """Returns the flagged row with the lowest sample index of each group, [N] bool (E11).

    Args:
      flag: [N] bool. group, sample: [N] int32.
    """
    return flag & (sample == to_rows(minimum(sample, group, flag, num_groups=num_groups), group))


def same_as(x: Array, chosen: Array, group: Array, *, num_groups: int) -> Array:
    """Returns the rows equal to the chosen row of their group, itself included, [N] bool; False where none is chosen.

    Args:
      x: [N, T] int32. chosen: [N] bool, at most one row of a group. group: [N] int32.
    """
    row = first_row(chosen, group, num_groups=num_groups)
    # Products of 0, 1 and integers are exact. Sums over [N, num_groups, T] would not fuse everywhere.
    is_row = row[:, None] == jnp.arange(x.shape[0], dtype=jnp.int32)[None, :]
    of_group = is_row.astype(x.dtype) @ x
    to_compare = _members(group, num_groups).astype(x.dtype) @ of_group
    return to_rows(row < x.shape[0], group) & jnp.all(x == to_compare, axis=1)


def first_group(label: Array, group: Array, *, num_groups: int) -> Array:
    """Returns the smallest group with the same label as each row's, [N] int32: an id of the label that does not depend
    on the order of the rows.

    Args:
      label: [N] uint32, the same in all rows of a group. group: [N] int32, 0..num_groups-1.
    """
    by_group = jnp.max(jnp.where(_members(group, num_groups), label[:, None], 0), axis=0)
    numbers = jnp.arange(num_groups, dtype=group.dtype)
    first = jnp.min(jnp.where(by_group[:, None] == by_group[None, :], numbers[None, :], num_groups), axis=1)
    return to_rows(first, group)


def varied(x: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns whether a group's valid values differ, [num_groups] bool, by exact comparison, not with an epsilon (E1).

    False for a group of one row or none (E2). True where a valid row is NaN: no zeros may take its place.
    """
    return ~(maximum(x, group, valid, num_groups=num_groups) <= minimum(x, group, valid, num_groups=num_groups))


def to_rows(value: Array, group: Array) -> Array:
    """Returns the value of each row's group. value: [num_groups]; group: [N] int32 -> [N], dtype of `value`."""
    members = _members(group, value.shape[0])
    if value.dtype == jnp.bool_:
        return jnp.any(members & value[None, :], axis=1)
    return jnp.sum(jnp.where(members, value[None, :], 0), axis=1)


def _members(group: Array, num_groups: int) -> Array:
    """Returns [N, num_groups] bool."""
    return group[:, None] == jnp.arange(num_groups, dtype=group.dtype)[None, :]
