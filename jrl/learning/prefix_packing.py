"""Which branch of which prompt goes into which row, where rows of a micro-batch see the beginning of one of them. Plain
numpy on the host."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
    """Branches of one prompt in adjacent rows of one micro-batch. The trunk lies at the beginning of the first row, and
    all of them see it."""

    group: int
    row: int  # the first
    rows: int


class Plan(NamedTuple):
    """Where each branch lies. Branches of length 0 lie nowhere: row -1."""

    row: np.ndarray  # [n] int32
    start: np.ndarray  # [n] int32, first column
    place: np.ndarray  # [n] int32, the how-many-th branch of its row, left to right
    parts: tuple[Part, ...]
    micro_batches: int  # in use; rows of micro-batch m are m * rows, ...


def plan_trunks(trunks: np.ndarray, branches: np.ndarray, *, row_length: int, rows: int, max_per_row: int) -> Plan:
    """Returns a plan that fills micro-batches group by group.

    What a group has left after a micro-batch is full goes on in the next, behind another copy of its trunk. Inside a
    part: best fit, longest first, as `packing.plan_rows`; equal lengths in order of index.

    Args:
      trunks: [groups] int, tokens of each trunk. branches: [groups, samples] int; 0 leaves one out.
      rows: of a micro-batch.
    Raises: ValueError where a branch fits no row beside or after its trunk.
    """
    row, start, place = (np.full(branches.shape, fill, np.int32) for fill in (-1, 0, 0))
    parts: list[Part] = []
    micro, used = 0, 0
    for group, trunk in enumerate(trunks):
        left = [i for i in np.argsort(-branches[group], kind="stable") if branches[group, i] > 0]
        while left:
            first, found, rest = micro * rows + used, [[row_length - int(trunk), 0]], []  # room and branches of rows
            for i in left:
                length = int(branches[group, i])
                fits = [(room, r) for r, (room, held) in enumerate(found) if room >= length and held < max_per_row]
                if not fits and len(found) < rows - used and length <= row_length:
                    found.append([row_length, 0])
                    fits = [(row_length, len(found) - 1)]
                if not fits:
                    rest.append(i)
                    continue
                _, r = min(fits)
                row[group, i], start[group, i], place[group, i] = first + r, row_length - found[r][0], found[r][1]
                found[r][0] -= length
                found[r][1] += 1
            if len(rest) < len(left):
                parts.append(Part(group, first, len(found)))
                used += len(found)
            elif used == 0:
                raise ValueError(
                    f"a trunk of {trunk} and a branch of {branches[group, left[0]]} tokens do not fit into "
                    f"{rows} rows of {row_length}"
                )
            if rest or used == rows:
                micro, used = micro + 1, 0
            left = rest
    return Plan(row, start, place, tuple(parts), micro + (used > 0))


def most_rows(groups: int, samples: int, trunk: int, branch: int, *, row_length: int, max_per_row: int) -> int:
    """Returns a number of rows that groups with trunks and branches up to these lengths never exceed, none of them cut.

    Of the longest branches a row holds k, and the first row k0 beside the trunk. Every row but the last holds as many,
    since one is opened only where no other has room: 1 + ceil((samples - k0) / k) for a group.
    """
    k, k0 = _fitting(trunk, branch, row_length, max_per_row)
    return groups * (1 + -(-max(samples - k0, 0) // k))


def most_micro_batches(
    groups: int, samples: int, trunk: int, branch: int, *, row_length: int, rows: int, max_per_row: int
) -> int:
    """Returns a number of micro-batches that plan_trunks never exceeds for trunks and branches up to these lengths.

    A micro-batch is closed with no row free, or one where k0 is 0; a cut adds at most one row to a group's own
    (`most_rows`); and each micro-batch holds a branch.
    """
    whole = most_rows(groups, samples, trunk, branch, row_length=row_length, max_per_row=max_per_row)
    if whole <= rows:
        return 1
    _, k0 = _fitting(trunk, branch, row_length, max_per_row)
    free = rows - 1 - (k0 == 0)
    return min(groups * samples, -(-whole // free) if free > 0 else groups * samples)


@functools.lru_cache
def micro_batches_of_longest(
    groups: int, samples: int, trunk: int, branch: int, *, row_length: int, rows: int, max_per_row: int
) -> int:
    """Returns the micro-batches of groups whose trunks and branches all have these lengths."""
    branches = np.full((groups, samples), branch)
    plan = plan_trunks(np.full(groups, trunk), branches, row_length=row_length, rows=rows, max_per_row=max_per_row)
    return plan.micro_batches


def _fitting(trunk: int, branch: int, row_length: int, max_per_row: int) -> tuple[int, int]:
    """Returns how many of the longest branches a row holds, without and with the longest trunk."""
    return min(row_length // branch, max_per_row), min(max(row_length - trunk, 0) // branch, max_per_row)
