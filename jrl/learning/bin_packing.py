"""Which sequence goes into which row of a packed batch. Plain numpy on the host."""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np


class Plan(NamedTuple):
    """Where each sequence lies. Sequences of length 0 lie nowhere: row -1."""

    row: np.ndarray  # [n] int32, 0..num_rows-1
    start: np.ndarray  # [n] int32, first column
    place: np.ndarray  # [n] int32, the how-many-th sequence of its row, 0..max_per_row-1, left to right
    num_rows: int


def plan_rows(lengths: np.ndarray, row_length: int, max_per_row: int, counts: np.ndarray | None = None) -> Plan:
    """Returns a plan that puts every sequence into one row, whole.

    Best fit, longest first: each sequence goes to the row with the least room that still takes it, the first such row,
    or opens a new one. Equal lengths go in order of index. Rows hold the same lengths in whatever order they are given.

    Args:
        lengths: [n] int, tokens of each sequence; 0 leaves one out.
        row_length: tokens a row holds.
        max_per_row: sequences a row holds.
        counts: [n] int, how many sequences each entry stands for, where entries are bundles of several; None: one. A
            bundle takes as many places, and `place` is its first.
    Raises: ValueError for a length below 0 or above row_length, naming the sequence.
    """
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or not (lengths.size == 0 or np.issubdtype(lengths.dtype, np.integer)):
        raise ValueError(f"lengths must be a list of whole numbers, not {lengths.dtype} {lengths.shape}")
    if row_length < 1 or max_per_row < 1:
        raise ValueError(f"row_length {row_length} and max_per_row {max_per_row} must be at least 1")
    wrong = np.flatnonzero((lengths < 0) | (lengths > row_length))
    if wrong.size:
        i = int(wrong[0])
        raise ValueError(f"sequence {i} has {lengths[i]} tokens; a row holds 0 to {row_length}")
    counts = np.ones(lengths.shape, np.int32) if counts is None else np.asarray(counts)
    if counts.size and counts.max() > max_per_row:
        raise ValueError(f"a bundle of {counts.max()} sequences is more than the {max_per_row} that a row holds")
    row = np.full(lengths.shape, -1, np.int32)
    start = np.zeros(lengths.shape, np.int32)
    place = np.zeros(lengths.shape, np.int32)
    room: list[tuple[int, int]] = []  # (tokens left, row) of rows that take another sequence, ascending
    held: list[int] = []  # sequences in each row
    for i in np.argsort(-lengths, kind="stable"):
        length, count = int(lengths[i]), int(counts[i])
        if length == 0:
            continue
        found = bisect.bisect_left(room, (length, -1))
        while found < len(room) and held[room[found][1]] + count > max_per_row:
            found += 1
        left, into = room.pop(found) if found < len(room) else (row_length, len(held))
        if into == len(held):
            held.append(0)
        row[i], start[i], place[i] = into, row_length - left, held[into]
        held[into] += count
        if left > length and held[into] < max_per_row:
            bisect.insort(room, (left - length, into))
    return Plan(row, start, place, len(held))


def most_rows(num_sequences: int, num_tokens: int, row_length: int, max_per_row: int) -> int:
    """Returns a number of rows that plan_rows never exceeds: what a batch of fixed shape has to hold.

    A row is closed by its count, of which there are at most n // S; or it is open, and of two open rows the later was
    begun with a sequence that did not fit into the earlier, so any two hold more than L tokens together and k >= 2 of
    them hold more than k L / 2. Hence

        rows <= n // S + max(1, ceil(2 tokens / L) - 1), and never more than n.
    """
    opened = max(1, -(-2 * num_tokens // row_length) - 1)
    return min(num_sequences, num_sequences // max_per_row + opened)


def padding_share(lengths: np.ndarray, num_rows: int, row_length: int) -> float:
    """Returns the share of a packed batch's columns that hold no token: 1 - sum(lengths) / (num_rows * row_length)."""
    if num_rows == 0:
        return 0.0
    return 1.0 - float(np.sum(lengths)) / (num_rows * row_length)
