"""Continuations of shared prefixes in rows that see a prefix in one of them."""

import itertools

import numpy as np
import pytest

from jrl.learning.prefix_packing import PrefixBlock, max_micro_batches, max_prefix_rows, plan_prefixes


def test_a_small_plan_by_hand():
    # Rows of 10, three to a micro-batch. Group 0: the prefix of 4 leaves 6; 7 opens row 1, 6 fills row 0, 5 opens row 2
    # and 3 goes to row 1, where it fits most tightly. Group 1 begins the next micro-batch: 9 beside a prefix of 2 opens
    # row 4, 8 fills row 3 up, 9 opens row 5; the last 4 find no row, and go after another copy of the prefix.
    continuations = np.array([[5, 7, 3, 6], [9, 4, 9, 8]])
    packing = plan_prefixes(np.array([4, 2]), continuations, row_length=10, rows=3, max_per_row=4)
    np.testing.assert_array_equal(packing.row, [[2, 1, 1, 0], [4, 6, 5, 3]])
    np.testing.assert_array_equal(packing.start, [[0, 0, 7, 4], [0, 2, 0, 2]])
    np.testing.assert_array_equal(packing.place, [[0, 0, 1, 0], [0, 0, 0, 0]])
    assert packing.blocks == (PrefixBlock(0, 0, 3), PrefixBlock(1, 3, 3), PrefixBlock(1, 6, 1))
    assert packing.micro_batches == 3


def test_continuations_of_no_length_have_no_row():
    packing = plan_prefixes(np.array([3, 3]), np.array([[0, 0], [0, 2]]), row_length=5, rows=1, max_per_row=1)
    np.testing.assert_array_equal(packing.row, [[-1, -1], [-1, 0]])
    assert packing.blocks == (PrefixBlock(1, 0, 1),) and packing.micro_batches == 1


def test_what_fits_nowhere_is_refused():
    with pytest.raises(ValueError, match="a prefix of 4 and a continuation of 7 tokens do not fit into 1 rows of 10"):
        plan_prefixes(np.array([4]), np.array([[7]]), row_length=10, rows=1, max_per_row=4)
    with pytest.raises(ValueError, match="a continuation of 11 tokens"):
        plan_prefixes(np.array([4]), np.array([[11]]), row_length=10, rows=3, max_per_row=4)


def test_the_longest_of_all_take_as_many_rows_as_are_counted():
    # A row of 129 holds a continuation of 129, and none beside a prefix of 63: nine rows for eight of them.
    assert max_prefix_rows(4, 8, 63, 129, row_length=129, max_per_row=32) == 4 * 9
    assert max_micro_batches(4, 8, 63, 129, row_length=129, rows=36, max_per_row=32) == 1
    packing = plan_prefixes(np.full(4, 63), np.full((4, 8), 129), row_length=129, rows=9, max_per_row=32)
    assert (packing.micro_batches, len(packing.blocks)) == (4, 4)


@pytest.mark.parametrize("row_length, rows", [(20, 2), (20, 3), (20, 7), (40, 1), (40, 4), (33, 5), (100, 2)])
def test_no_batch_takes_more_than_is_counted_and_every_continuation_is_placed_once(row_length, rows):
    rng = np.random.default_rng(0)
    groups, samples, places = 5, 6, 4
    shape = dict(row_length=row_length, max_per_row=places)
    for trial in range(200):
        prefix, continuation = (15, 20) if trial % 4 == 0 else rng.integers(1, 21, 2)
        longest = trial % 3 == 0
        prefixes = np.full(groups, prefix) if longest else rng.integers(0, prefix + 1, groups)
        continuations = (
            np.full((groups, samples), continuation)
            if longest
            else rng.integers(0, continuation + 1, (groups, samples))
        )
        packing = plan_prefixes(prefixes, continuations, rows=rows, **shape)
        assert packing.micro_batches <= max_micro_batches(groups, samples, prefix, continuation, rows=rows, **shape)
        by_row = {part.row: [(0, int(prefixes[part.group]))] for part in packing.blocks}
        of_row = {row: part for part in packing.blocks for row in range(part.row, part.row + part.rows)}
        for (g, i), length in np.ndenumerate(continuations):
            row, start = packing.row[g, i], packing.start[g, i]
            assert (row >= 0) == (length > 0)
            if length:
                assert of_row[row].group == g and row // rows == of_row[row].row // rows
                by_row.setdefault(row, []).append((start, start + length))
        for row, taken in by_row.items():
            taken.sort()
            assert taken[-1][1] <= row_length and len(taken) - (row == of_row[row].row) <= places
            assert all(one[1] <= two[0] for one, two in itertools.pairwise(taken))
