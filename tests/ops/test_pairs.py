from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import groups, pairs, preferences
from jrl.ops.pairs import tournament
from jrl.ops.win_rate import win_probability

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
    place = jnp.arange(5, dtype=jnp.int32)
    run = jax.jit(functools.partial(tournament, num_groups=2))
    label, unit = run(jnp.asarray(wins), group, place, valid, margin=0.0)
    np.testing.assert_array_equal(label, [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(unit, [-1, -1, 0, 0, -1])
    both = jnp.array([0, 1, 1, 0, 1], jnp.int32)  # two rows meet once: 0.9 and 0.1, 0.8 apart
    assert (run(jnp.asarray(wins), both, place, both == 0, margin=0.7)[1] >= 0).sum() == 2
    # shares of wins 0.9, 0.5 and 0.1: a margin of 0.81 leaves no pair
    assert (run(jnp.asarray(wins), group, place, valid, margin=0.81)[1] == -1).all()


def test_a_circle_of_wins_has_no_pair_and_order_cancels():
    circle = jnp.array([[0.5, 1, 0], [0, 0.5, 1], [1, 0, 0.5]])
    group, place, valid = jnp.zeros(3, jnp.int32), jnp.arange(3, dtype=jnp.int32), jnp.ones(3, bool)
    run = jax.jit(functools.partial(tournament, num_groups=1, margin=0.0))
    assert (run(circle, group, place, valid)[1] == -1).all()
    first_wins = jnp.ones((3, 3))  # a judge that always takes the first
    assert (run(first_wins, group, place, valid)[1] == -1).all()


def test_who_meets_nobody_is_neither_best_nor_worst_and_two_that_meet_once_have_whole_shares():
    # Sample 0 beats 1 by 0.8 to 0.2; nobody was asked about sample 2.
    wins = jnp.array([[NAN, 0.8, NAN], [0.2, NAN, NAN], [NAN, NAN, NAN]])
    group, place, valid = jnp.zeros(3, jnp.int32), jnp.arange(3, dtype=jnp.int32), jnp.ones(3, bool)
    run = jax.jit(functools.partial(tournament, num_groups=1))
    label, unit = run(wins, group, place, valid, margin=0.55)
    np.testing.assert_array_equal(label, [1, 0, 0])
    np.testing.assert_array_equal(unit, [0, 0, -1])
    assert (run(wins, group, place, valid, margin=0.65)[1] == -1).all()
    # Row 0 met only row 3, which is not valid; that says nothing of row 0, and row 1 lost to row 2.
    wins = np.full((4, 4), NAN, np.float32)
    for winner, loser in ((3, 0), (2, 1)):
        wins[winner, loser], wins[loser, winner] = 0.9, 0.1
    label, unit = run(jnp.asarray(wins), jnp.zeros(4, jnp.int32), jnp.arange(4, dtype=jnp.int32),
                      jnp.array([True, True, True, False]), margin=0.0)  # fmt: skip
    assert (label.tolist(), unit.tolist()) == ([0, 0, 1, 0], [-1, 0, 0, -1])


def whole_batch(preference, group, valid, num_groups):
    """Returns the pairs of a tournament from preferences of all rows of a batch, [N, N], compared one by one."""
    n = len(group)
    share = np.zeros(n)
    for i in range(n):
        met = [j for j in range(n) if j != i and group[j] == group[i] and valid[i] and valid[j]]
        wins = [(preference[i, j] + 1 - preference[j, i]) / 2 for j in met]
        share[i] = sum(wins) / max(len(wins), 1)
    return paired(share, group, valid, num_groups)


def test_a_tournament_of_every_prompt_is_that_of_the_whole_batch():
    rng = np.random.default_rng(0)
    group, place = np.repeat(np.arange(3), 4), np.tile(np.arange(4), 3)
    valid = rng.uniform(size=12) > 0.25
    all_rows = np.where(valid[:, None] & valid[None, :], rng.integers(0, 9, (12, 12)) / 8, NAN)  # sums are exact
    order = rng.permutation(12)  # rows may lie in any order, and row 5 is missing
    order = order[order != 5]
    by_sample = np.stack([all_rows[i, 4 * group[i] : 4 * group[i] + 4] for i in range(12)])
    given = [jnp.asarray(x[order]) for x in (by_sample, group, place, valid)]
    found = jax.jit(functools.partial(tournament, num_groups=3, margin=0.0))(*given)
    cut = all_rows[np.ix_(order, order)]
    for a, b in zip(found, whole_batch(cut, group[order], valid[order], 3)):
        np.testing.assert_array_equal(a, b)
    assert (np.asarray(found[1]) >= 0).sum() == 6


def test_shares_of_wins_and_strengths_of_a_pair_by_hand():
    # Row 0 is shown first with 0.9 against sample 1, which is shown first with 0.3: (0.9 + 0.7) / 2 = 0.8. Against
    # sample 2: (0.5 + 1 - 0.1) / 2 = 0.7. Samples 1 and 2 were compared in one order alone.
    preference = jnp.array([[NAN, 0.9, 0.5], [0.3, NAN, NAN], [0.1, 0.6, NAN], [0.2, NAN, NAN]])
    group, place = jnp.array([0, 0, 0, 1], jnp.int32), jnp.array([0, 1, 2, 0], jnp.int32)
    everyone, static = jnp.ones(4, bool), {"num_groups": 2}
    share = jax.jit(functools.partial(preferences.win_share, **static))
    np.testing.assert_allclose(share(preference, group, place, everyone, everyone), [0.75, 0.2, 0.3, 0.5], 1e-6)
    # Against sample 2 alone; who is no player has 1/2.
    last = place == 2
    np.testing.assert_allclose(share(preference, group, place, ~last, last), [0.7, 0.5, 0.5, 0.5], 1e-6)
    # Row 0 is no player, and row 2, which is the only opponent, has none.
    np.testing.assert_array_equal(share(preference, group, place, last, last), [0.5, 0.5, 0.5, 0.5])
    # Row 0 has two opponents, to whom it is none.
    np.testing.assert_allclose(share(preference, group, place, place == 0, place > 0), [0.75, 0.5, 0.5, 0.5], 1e-6)
    narrow = share(preference.astype(jnp.bfloat16), group, place, ~last, last)  # sums are not of the narrow type
    assert narrow.dtype == jnp.float32
    strength = jax.jit(functools.partial(preferences.pair_strength, **static))
    pair = lambda *rows: jnp.zeros(4, bool).at[jnp.array(rows)].set(True)
    np.testing.assert_allclose(strength(preference, group, place, pair(0, 1)), [0.8, 0.2, 0.5, 0.5], 1e-6)
    np.testing.assert_allclose(strength(preference, group, place, pair(0, 2)), [0.7, 0.5, 0.3, 0.5], 1e-6)
    np.testing.assert_array_equal(np.isnan(strength(preference, group, place, pair(1, 2))), [0, 1, 1, 0])
    # Where who wins follows from scores, the shares are those of the scores.
    score = jnp.array([0.3, 0.7, 0.3, 0.1, 0.2])
    certain = (1 + jnp.sign(score[:, None] - score[None, :])) / 2
    one = jnp.zeros(5, jnp.int32), jnp.arange(5, dtype=jnp.int32), jnp.ones(5, bool), jnp.ones(5, bool)
    expected = win_probability(score, one[0], one[2], one[3], num_groups=1)
    np.testing.assert_array_equal(preferences.win_share(certain, *one, num_groups=1), expected)


def test_a_feasible_row_is_preferred_to_an_infeasible_one_by_hand():
    # Group 0: feasible 0.2 and 0.9, infeasible 2.0 and 0.1: 0.9 over 0.1. Group 1: all feasible: 3 over 1. Group 2:
    # none feasible. Group 3: all feasible and equal. Group 4: an infeasible row that is better than the feasible one.
    # Group 5: the infeasible row has no verdict, so that one row is left.
    reward = jnp.array([0.2, 0.9, 2.0, 0.1, 3.0, 1.0, 2.0, 5.0, 4.0, 1.0, 1.0, 0.0, 7.0, 1.0, NAN])
    group = jnp.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5], jnp.int32)
    feasible = jnp.array([1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0], bool)
    run = jax.jit(lambda *x: pairs.feasible_against_infeasible(*x, num_groups=6))
    label, unit = run(reward, group, ~jnp.isnan(reward), feasible)
    np.testing.assert_array_equal(label, [0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0])
    np.testing.assert_array_equal(unit, [-1, 0, -1, 0, 1, 1, -1, -1, -1, -1, -1, 4, 4, -1, -1])


def test_with_every_row_feasible_the_best_is_preferred_to_the_worst():
    rng = np.random.default_rng(0)
    reward, group = jnp.asarray(rng.normal(size=24), jnp.float32), jnp.repeat(jnp.arange(4, dtype=jnp.int32), 6)
    valid = jnp.asarray(rng.uniform(size=24) > 0.3)
    found = pairs.feasible_against_infeasible(reward, group, valid, jnp.ones(24, bool), num_groups=4)
    expected = pairs.best_against_worst(reward, group, valid, num_groups=4, margin=0.0)
    for a, b in zip(found, expected):
        np.testing.assert_array_equal(a, b)
