"""Branches of prompts in rows that see the beginning of one of them."""

import itertools

import numpy as np
import pytest

from jrl.learning.prefix_packing import Part, most_micro_batches, most_rows, plan_trunks


def test_a_small_plan_by_hand():
    # Rows of 10, three to a micro-batch. Group 0: the trunk of 4 leaves 6; 7 opens row 1, 6 fills row 0, 5 opens row 2
    # and 3 goes to row 1, where it fits most tightly. Group 1 begins the next micro-batch: 9 beside a trunk of 2 opens
    # row 4, 8 fills row 3 up, 9 opens row 5; the last 4 find no row, and go behind another trunk.
    branches = np.array([[5, 7, 3, 6], [9, 4, 9, 8]])
    found = plan_trunks(np.array([4, 2]), branches, row_length=10, rows=3, max_per_row=4)
    np.testing.assert_array_equal(found.row, [[2, 1, 1, 0], [4, 6, 5, 3]])
    np.testing.assert_array_equal(found.start, [[0, 0, 7, 4], [0, 2, 0, 2]])
    np.testing.assert_array_equal(found.place, [[0, 0, 1, 0], [0, 0, 0, 0]])
    assert found.parts == (Part(0, 0, 3), Part(1, 3, 3), Part(1, 6, 1))
    assert found.micro_batches == 3


def test_branches_of_no_length_lie_nowhere():
    found = plan_trunks(np.array([3, 3]), np.array([[0, 0], [0, 2]]), row_length=5, rows=1, max_per_row=1)
    np.testing.assert_array_equal(found.row, [[-1, -1], [-1, 0]])
    assert found.parts == (Part(1, 0, 1),) and found.micro_batches == 1


def test_what_fits_nowhere_is_refused():
    with pytest.raises(ValueError, match="a trunk of 4 and a branch of 7 tokens do not fit into 1 rows of 10"):
        plan_trunks(np.array([4]), np.array([[7]]), row_length=10, rows=1, max_per_row=4)
    with pytest.raises(ValueError, match="a branch of 11 tokens"):
        plan_trunks(np.array([4]), np.array([[11]]), row_length=10, rows=3, max_per_row=4)


def test_the_longest_of_all_take_as_many_rows_as_are_counted():
    # A row of 129 holds a branch of 129, and none beside a trunk of 63: nine rows for eight of them.
    assert most_rows(4, 8, 63, 129, row_length=129, max_per_row=32) == 4 * 9
    assert most_micro_batches(4, 8, 63, 129, row_length=129, rows=36, max_per_row=32) == 1
    found = plan_trunks(np.full(4, 63), np.full((4, 8), 129), row_length=129, rows=9, max_per_row=32)
    assert (found.micro_batches, len(found.parts)) == (4, 4)


@pytest.mark.parametrize("row_length, rows", [(20, 2), (20, 3), (20, 7), (40, 1), (40, 4), (33, 5), (100, 2)])
def test_no_batch_takes_more_than_is_counted_and_every_branch_lies_once(row_length, rows):
    rng = np.random.default_rng(0)
    groups, samples, places = 5, 6, 4
    shape = dict(row_length=row_length, max_per_row=places)
    for trial in range(200):
        trunk, branch = (15, 20) if trial % 4 == 0 else rng.integers(1, 21, 2)
        longest = trial % 3 == 0
        trunks = np.full(groups, trunk) if longest else rng.integers(0, trunk + 1, groups)
        branches = np.full((groups, samples), branch) if longest else rng.integers(0, branch + 1, (groups, samples))
        found = plan_trunks(trunks, branches, rows=rows, **shape)
        assert found.micro_batches <= most_micro_batches(groups, samples, trunk, branch, rows=rows, **shape)
        by_row = {part.row: [(0, int(trunks[part.group]))] for part in found.parts}
        of_row = {row: part for part in found.parts for row in range(part.row, part.row + part.rows)}
        for (g, i), length in np.ndenumerate(branches):
            row, start = found.row[g, i], found.start[g, i]
            assert (row >= 0) == (length > 0)
            if length:
                assert of_row[row].group == g and row // rows == of_row[row].row // rows
                by_row.setdefault(row, []).append((start, start + length))
        for row, taken in by_row.items():
            taken.sort()
            assert taken[-1][1] <= row_length and len(taken) - (row == of_row[row].row) <= places
            assert all(one[1] <= two[0] for one, two in itertools.pairwise(taken))
