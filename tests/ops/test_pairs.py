from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import groups, pairs

NAN = float("nan")


def paired(reward, group, valid, num_groups, margin=0.0):
    fn = jax.jit(lambda *x: pairs.best_against_worst(*x, num_groups=num_groups, margin=margin))
    return map(np.asarray, fn(jnp.array(reward), jnp.array(group, jnp.int32), jnp.array(valid, bool)))


def test_the_best_is_paired_with_the_worst_by_hand():
    # [1.2, 0.3, 1.2, 0.5]: row 0 is preferred to row 1, of equal ones the first. [0.4, 0.4]: no pair.
    label, unit = paired([1.2, 0.3, 1.2, 0.5, 0.4, 0.4], [0, 0, 0, 0, 1, 1], [1] * 6, 2)
    np.testing.assert_array_equal(label, [1, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(unit, [0, 0, -1, -1, -1, -1])
    assert label.dtype == np.float32 and unit.dtype == np.int32


def test_the_first_of_the_worst_is_taken_too_and_groups_may_be_mixed():
    label, unit = paired([0.0, 3.0, 0.0, 5.0, 1.0, 5.0], [1, 0, 1, 0, 1, 0], [1] * 6, 3)
    np.testing.assert_array_equal(unit, [1, 0, -1, 0, 1, -1])
    np.testing.assert_array_equal(label, [0, 0, 0, 1, 1, 0])


def test_rows_without_a_verdict_are_in_no_pair_and_one_alone_has_none():
    label, unit = paired([NAN, 1.0, 0.0, 9.0, NAN, 2.0], [0, 0, 0, 0, 1, 1], [0, 1, 1, 0, 0, 1], 3)
    np.testing.assert_array_equal(unit, [-1, 0, 0, -1, -1, -1])
    np.testing.assert_array_equal(label, [0, 1, 0, 0, 0, 0])


def test_a_pair_is_farther_apart_than_the_margin():
    for margin, expected in ((0.4, [0, 0]), (0.5, [-1, -1]), (0.6, [-1, -1])):
        _, unit = paired([1.0, 0.5], [0, 0], [1, 1], 1, margin)
        np.testing.assert_array_equal(unit, expected)


def test_the_first_row_with_a_flag():
    found = groups.first_row(jnp.array([False, True, True, False]), jnp.array([1, 0, 1, 2]), num_groups=4)
    np.testing.assert_array_equal(found, [1, 2, 4, 4])
