from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import groups, pairs
from jrl.ops.pairs import tournament

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


def of_pairing(fn, reward, group, valid, num_groups, *draw, margin=0.0):
    found = jax.jit(lambda *x: fn(*x, num_groups=num_groups, margin=margin))(
        jnp.array(reward), jnp.array(group, jnp.int32), jnp.array(valid, bool), *map(jnp.array, draw)
    )
    return map(np.asarray, found)


def test_the_best_two_are_paired_by_hand():
    # Group 0: 1.2 in row 2 before 0.9 in row 0. Group 1: the best two tie, no pair. Group 2: one row alone.
    reward, group = [0.9, 0.3, 1.2, NAN, 2.0, 2.0, 1.0, 5.0], [0, 0, 0, 0, 1, 1, 1, 2]
    label, unit = of_pairing(pairs.best_two, reward, group, [1, 1, 1, 0, 1, 1, 1, 1], 3)
    np.testing.assert_array_equal(unit, [0, -1, 0, -1, -1, -1, -1, -1])
    np.testing.assert_array_equal(label, [0, 0, 1, 0, 0, 0, 0, 0])


def test_the_best_is_paired_with_the_row_of_the_highest_draw_by_hand():
    # Of rows 1, 2 and 3 row 2 has the highest draw; the draw of the best does not count, nor that of row 4.
    reward, draw = [3.0, 0.0, 1.0, 2.0, NAN], [0.99, 0.2, 0.7, 0.5, 1.0]
    label, unit = of_pairing(pairs.best_against_random, reward, [0] * 5, [1, 1, 1, 1, 0], 1, draw)
    np.testing.assert_array_equal(unit, [0, -1, 0, -1, -1])
    np.testing.assert_array_equal(label, [1, 0, 0, 0, 0])
    # Where that row ties with the best there is no preference, though another is worse.
    _, unit = of_pairing(pairs.best_against_random, [3.0, 3.0, 1.0], [0] * 3, [1] * 3, 1, [0.1, 0.9, 0.2])
    np.testing.assert_array_equal(unit, [-1, -1, -1])
    _, unit = of_pairing(pairs.best_against_random, [3.0, 2.5, 1.0], [0] * 3, [1] * 3, 1, [0.1, 0.9, 0.2], margin=0.5)
    np.testing.assert_array_equal(unit, [-1, -1, -1])


def test_a_tournament_prefers_the_row_of_the_most_wins():
    # rows 0, 2, 3 of group 0: 2 beats both, 0 beats 3; row 1 is of group 1 alone, row 4 is not valid
    wins = np.full((5, 5), np.nan, np.float32)
    for winner, loser in ((2, 0), (2, 3), (0, 3)):
        wins[winner, loser], wins[loser, winner] = 0.9, 0.1
    group, valid = jnp.array([0, 1, 0, 0, 0], jnp.int32), jnp.array([True, True, True, True, False])
    run = jax.jit(functools.partial(tournament, num_groups=2, margin=0.0))
    label, unit = run(jnp.asarray(wins), group, valid)
    np.testing.assert_array_equal(label, [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(unit, [-1, -1, 0, 0, -1])
    both = jnp.array([0, 9, 9, 0, 9], jnp.int32)  # two rows meet once: 0.9 and 0.1, 0.8 apart
    assert (tournament(jnp.asarray(wins), both, both == 0, num_groups=1, margin=0.7)[1] >= 0).sum() == 2
    # shares of wins 0.9, 0.5 and 0.1: a margin of 0.81 leaves no pair
    assert (tournament(jnp.asarray(wins), group, valid, num_groups=2, margin=0.81)[1] == -1).all()


def test_a_circle_of_wins_has_no_pair_and_order_cancels():
    circle = jnp.array([[0.5, 1, 0], [0, 0.5, 1], [1, 0, 0.5]])
    group, valid = jnp.zeros(3, jnp.int32), jnp.ones(3, bool)
    assert (tournament(circle, group, valid, num_groups=1, margin=0.0)[1] == -1).all()
    first_wins = jnp.ones((3, 3))  # a judge that always takes the first
    assert (tournament(first_wins, group, valid, num_groups=1, margin=0.0)[1] == -1).all()
