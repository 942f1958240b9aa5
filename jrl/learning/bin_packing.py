"""Assigns sequences to the rows of a packed batch. Plain numpy on the host."""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np


class RowPlan(NamedTuple):
    """The place of each sequence; row -1 for one of length 0."""

    row: np.ndarray  # [n] int32, 0..num_rows-1
    start: np.ndarray  # [n] int32, first column
    place: np.ndarray  # [n] int32, index of the sequence in its row, 0..max_per_row-1, from the left
    num_rows: int


def plan_rows(lengths: np.ndarray, row_length: int, max_per_row: int, counts: np.ndarray | None = None) -> RowPlan:
    """Returns a plan that puts every sequence into one row without splitting it.

    Best fit, longest first: each sequence goes to the first of the rows with the least free space that still fits it,
    or opens a new row. Equal lengths are placed in order of index. The lengths in each row do not depend on the order
    of the sequences.

    Args:
        lengths: [n] int, tokens of each sequence; 0 leaves one out.
        row_length: tokens a row holds.
        max_per_row: sequences a row holds.
        counts: [n] int, number of sequences in each entry, if entries are bundles; None: 1 each. A bundle takes
            that many places, and `place` is the first.
    Raises: ValueError for a length below 0 or above row_length, naming the sequence.
    """
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or not (lengths.size == 0 or np.issubdtype(lengths.dtype, np.integer)):
        raise ValueError(f"lengths must be a list of whole numbers, not {lengths.dtype} {lengths.shape}")
    if row_length < 1 or max_per_row < 1:
        raise ValueError(f"row_length {row_length} and max_per_row {max_per_row} must be at least 1")
    invalid = np.flatnonzero((lengths < 0) | (lengths > row_length))
    if invalid.size:
        i = int(invalid[0])
        raise ValueError(f"sequence {i} has {lengths[i]} tokens; a row holds 0 to {row_length}")
    counts = np.ones(lengths.shape, np.int32) if counts is None else np.asarray(counts)
    if counts.size and counts.max() > max_per_row:
        raise ValueError(f"a bundle of {counts.max()} sequences is more than the {max_per_row} that a row holds")
    row = np.full(lengths.shape, -1, np.int32)
    start = np.zeros(lengths.shape, np.int32)
    place = np.zeros(lengths.shape, np.int32)
    room: list[tuple[int, int]] = []  # (free tokens, row) of rows that can take another sequence, ascending
    held: list[int] = []  # sequences in each row
    for i in np.argsort(-lengths, kind="stable"):
        length, count = int(lengths[i]), int(counts[i])
        if length == 0:
            continue
        index = bisect.bisect_left(room, (length, -1))
        while index < len(room) and held[room[index][1]] + count > max_per_row:
            index += 1
        left, into = room.pop(index) if index < len(room) else (row_length, len(held))
        if into == len(held):
            held.append(0)
        row[i], start[i], place[i] = into, row_length - left, held[into]
        held[into] += count
        if left > length and held[into] < max_per_row:
            bisect.insort(room, (left - length, into))
    return RowPlan(row, start, place, len(held))
