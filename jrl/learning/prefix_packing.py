"""Assigns continuations of shared prefixes to rows. A prefix is at the beginning of one row of a micro-batch, and other
rows attend to it. Plain numpy on the host."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np


class PrefixBlock(NamedTuple):
    """Adjacent rows of one micro-batch with continuations of one prefix. The prefix is at the beginning of the first
    row, and all rows attend to it."""

    group: int
    row: int  # the first row
    rows: int


class PrefixPlan(NamedTuple):
    """The place of each continuation; row -1 for one of length 0."""

    row: np.ndarray  # [n] int32
    start: np.ndarray  # [n] int32, first column
    place: np.ndarray  # [n] int32, index of the continuation in its row, from the left
    blocks: tuple[PrefixBlock, ...]
    micro_batches: int  # in use; rows of micro-batch m are m * rows, ...


def plan_prefixes(
    prefixes: np.ndarray, continuations: np.ndarray, *, row_length: int, rows: int, max_per_row: int
) -> PrefixPlan:
    """Returns a plan that fills micro-batches group by group.

    When a micro-batch is full, the rest of the group goes into the next one, after another copy of its prefix. Inside a
    block: best fit, longest first, as `bin_packing.plan_rows`; equal lengths in order of index.

    Args:
      prefixes: [groups] int, tokens of each prefix. continuations: [groups, samples] int; 0 leaves one out.
      rows: of a micro-batch.
    Raises: ValueError where a continuation does not fit in any row.
    """
    row, start, place = (np.full(continuations.shape, fill, np.int32) for fill in (-1, 0, 0))
    blocks: list[PrefixBlock] = []
    micro, used = 0, 0
    for group, prefix in enumerate(prefixes):
        remaining = [i for i in np.argsort(-continuations[group], kind="stable") if continuations[group, i] > 0]
        while remaining:
            first, overflow = micro * rows + used, []
            open_rows = [[row_length - int(prefix), 0]]  # free tokens and number of continuations of each
            for i in remaining:
                length = int(continuations[group, i])
                fits = [
                    (free, r) for r, (free, count) in enumerate(open_rows) if free >= length and count < max_per_row
                ]
                if not fits and len(open_rows) < rows - used and length <= row_length:
                    open_rows.append([row_length, 0])
                    fits = [(row_length, len(open_rows) - 1)]
                if not fits:
                    overflow.append(i)
                    continue
                _, r = min(fits)
                row[group, i] = first + r
                start[group, i] = row_length - open_rows[r][0]
                place[group, i] = open_rows[r][1]
                open_rows[r][0] -= length
                open_rows[r][1] += 1
            if len(overflow) < len(remaining):
                blocks.append(PrefixBlock(group, first, len(open_rows)))
                used += len(open_rows)
            elif used == 0:
                raise ValueError(
                    f"a prefix of {prefix} and a continuation of {continuations[group, remaining[0]]} tokens do not "
                    f"fit into {rows} rows of {row_length}"
                )
            if overflow or used == rows:
                micro, used = micro + 1, 0
            remaining = overflow
    return PrefixPlan(row, start, place, tuple(blocks), micro + (used > 0))


def max_prefix_rows(
    groups: int, samples: int, prefix: int, continuation: int, *, row_length: int, max_per_row: int
) -> int:
    """Returns an upper bound on the rows of groups with prefixes and continuations up to these lengths, where no group
    is split over micro-batches.

    A row holds k of the longest continuations, and the first row k0 in addition to the prefix. Every row but the last
    is that full, since a row is opened only if no other has room: 1 + ceil((samples - k0) / k) for a group.
    """
    k, k0 = _fitting(prefix, continuation, row_length, max_per_row)
    return groups * (1 + -(-max(samples - k0, 0) // k))


def max_micro_batches(
    groups: int, samples: int, prefix: int, continuation: int, *, row_length: int, rows: int, max_per_row: int
) -> int:
    """Returns an upper bound on the micro-batches of plan_prefixes for prefixes and continuations up to these lengths.

    A micro-batch is closed with no free row, or with one if k0 is 0; a split adds at most one row to the rows of a
    group (`max_prefix_rows`); and each micro-batch holds a continuation.
    """
    max_rows = max_prefix_rows(groups, samples, prefix, continuation, row_length=row_length, max_per_row=max_per_row)
    if max_rows <= rows:
        return 1
    _, k0 = _fitting(prefix, continuation, row_length, max_per_row)
    free = rows - 1 - (k0 == 0)
    return min(groups * samples, -(-max_rows // free) if free > 0 else groups * samples)


@functools.lru_cache
def micro_batches_of_longest(
    groups: int, samples: int, prefix: int, continuation: int, *, row_length: int, rows: int, max_per_row: int
) -> int:
    """Returns the micro-batches of groups whose prefixes and continuations all have these lengths."""
    continuations = np.full((groups, samples), continuation)
    plan = plan_prefixes(
        np.full(groups, prefix), continuations, row_length=row_length, rows=rows, max_per_row=max_per_row
    )
    return plan.micro_batches


def _fitting(prefix: int, continuation: int, row_length: int, max_per_row: int) -> tuple[int, int]:
    """Returns how many of the longest continuations a row holds, without and with the longest prefix."""
    return min(row_length // continuation, max_per_row), min(max(row_length - prefix, 0) // continuation, max_per_row)
