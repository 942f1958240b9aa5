from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import advantages, filters
from jrl.types import Finish

NAN = float("nan")


def has_signal(outcome, group, valid=None):
    valid = jnp.ones(len(outcome), bool) if valid is None else jnp.array(valid)
    fn = jax.jit(filters.has_signal, static_argnames="num_groups")
    return fn(jnp.array(outcome), jnp.array(group, jnp.int32), valid, num_groups=4)


def test_only_groups_of_mixed_outcomes_are_kept():
    # groups [1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0] -> keep [0, 1, 0]
    outcome = [1.0] * 4 + [0.0, 1.0, 0.0, 0.0] + [0.0] * 4
    np.testing.assert_array_equal(
        has_signal(outcome, [0] * 4 + [1] * 4 + [2] * 4), [False] * 4 + [True] * 4 + [False] * 4
    )


def test_shaping_would_keep_what_accuracy_drops():
    np.testing.assert_array_equal(has_signal([1.0, 1.0, 1.0, 1.0], [0] * 4), [False] * 4)
    np.testing.assert_array_equal(has_signal([1.0, 0.9, 1.0, 1.0], [0] * 4), [True] * 4)


def test_rows_without_a_verdict_give_no_signal():
    # group 0: 1 and a missing one; group 1: 1, 0 and a missing one; group 2: one row
    signal = has_signal([1.0, NAN, 1.0, 0.0, NAN, 1.0], [0, 0, 1, 1, 1, 2], [True, False, True, True, False, True])
    np.testing.assert_array_equal(signal, [False, False, True, True, True, False])


def test_a_group_is_kept_where_its_zscores_are_not_zero():
    outcome = jax.random.bernoulli(jax.random.key(0), 0.3, (40,)).astype(jnp.float32)
    group = jnp.arange(40, dtype=jnp.int32) % 10
    signal = filters.has_signal(outcome, group, jnp.ones(40, bool), num_groups=10)
    score = advantages.group_zscore(outcome, group, jnp.ones(40, bool), num_groups=10)
    np.testing.assert_array_equal(signal, score != 0)
    assert signal.any() and not signal.all()


def rows(fn, reward, group, valid=None, *more, num_groups=2):
    """Returns the kept rows of a filter of groups, under jit."""
    valid = jnp.ones(len(reward), bool) if valid is None else jnp.array(valid)
    kept = jax.jit(fn, static_argnames="num_groups")(
        jnp.array(reward), jnp.array(group, jnp.int32), valid, *more, num_groups=num_groups
    )
    return np.flatnonzero(kept).tolist()


def test_only_prompts_without_a_right_greedy_answer_are_sampled():
    # greedy correct = [1, 0, 0, 1] -> keep [0, 1, 1, 0]; a prompt whose answer was not judged stays
    unsolved = jax.jit(filters.unsolved)
    np.testing.assert_array_equal(
        unsolved(jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.ones(4, bool)), [False, True, True, False]
    )
    np.testing.assert_array_equal(unsolved(jnp.array([1.0, NAN]), jnp.array([True, False])), [False, True])
    np.testing.assert_array_equal(unsolved(jnp.array([1.0, 1.0]), jnp.array([True, False])), [False, True])


def test_policy_filtration_keeps_the_best_and_its_partner():
    # R = [0.2, 0.9, 0.5, 0.1]: best of n {1}; best and worst {1, 3}; best and random {1, one of 0, 2, 3}
    reward, group = [0.2, 0.9, 0.5, 0.1], [0, 0, 0, 0]
    assert rows(filters.best, reward, group) == [1]
    assert rows(filters.best_and_worst, reward, group) == [1, 3]
    assert rows(filters.best_and_worst, reward, group, [True, True, True, False]) == [0, 1]  # 0.1 has no verdict
    assert rows(filters.best_and_worst, [0.5, 0.5], [0, 0]) == [0, 1]  # the worst of the others
    for other in (0, 2, 3):
        draw = jnp.zeros(4).at[other].set(0.5).at[1].set(0.9)  # that of the best row does not count
        assert rows(filters.best_and_random, reward, group, None, draw) == sorted([1, other])


def test_policy_filtration_takes_the_lowest_index_at_ties_and_keeps_single_rows():
    # group 0: three equal ones; group 1: one row; a group of rows without a verdict keeps none
    reward, group = [0.5, 0.5, 0.5, 0.3], [0, 0, 0, 1]
    assert rows(filters.best, reward, group) == [0, 3]
    assert rows(filters.best_and_worst, reward, group) == [0, 1, 3]
    assert rows(filters.best_and_worst, [NAN, NAN, -2.0, -3.0], [0, 0, 1, 1], [False, False, True, True]) == [2, 3]
    assert rows(filters.best_and_worst, [NAN, -1.0, -2.0, -3.0], [0, 0, 0, 0], [False, True, True, True]) == [1, 3]


def test_policy_filtration_is_blind_to_row_order_and_to_other_groups():
    reward = jax.random.normal(jax.random.key(0), (24,))
    group = jnp.arange(24) % 3
    mixed = jax.random.permutation(jax.random.key(1), 24)
    kept = filters.best_and_worst(reward, group, jnp.ones(24, bool), num_groups=3)
    again = filters.best_and_worst(reward[mixed], group[mixed], jnp.ones(24, bool), num_groups=3)
    np.testing.assert_array_equal(kept[mixed], again)
    assert int(kept.sum()) == 6
    for g in range(3):
        own = np.flatnonzero(group == g)
        expected = {own[np.argmax(reward[own])], own[np.argmin(reward[own])]}
        assert set(np.flatnonzero(kept & (group == g))) == expected


def test_the_agreement_of_scores_with_the_truth_is_r_squared():
    # scores [0, 1, 2], truths [0, 2, 1]: covariance sum 1, both spreads 2: 1 / 4
    keep = jnp.array([True, True, True, False])
    agreement = jax.jit(filters.score_agreement)
    found = agreement(jnp.array([0.0, 1.0, 2.0, NAN]), jnp.array([0.0, 2.0, 1.0, NAN]), keep)
    np.testing.assert_allclose(found, 0.25, rtol=1e-6)
    line = agreement(jnp.array([0.0, 1.0, 2.0, 9.0]), jnp.array([5.0, 3.0, 1.0, 0.0]), keep)  # falls, and is exact
    np.testing.assert_allclose(line, 1, rtol=1e-6)
    assert agreement(jnp.ones(4), jnp.arange(4.0), keep) == 0
    for scale in (1e-25, 1e25):  # whose square float32 does not hold
        assert agreement(scale * jnp.array([0.0, 1.0, 2.0, NAN]), jnp.array([0.0, 2.0, 1.0, NAN]), keep) == 0
    # The mean of seven times 0.7 is rounded, and so is that of 0.3: the two distances to it are no agreement (E1).
    assert agreement(jnp.full(7, 0.7), jnp.full(7, 0.3), jnp.ones(7, bool)) == 0
    small = agreement(jnp.array([0.0, 0.1, 0.2, NAN]), jnp.array([0.0, 0.2, 0.1, NAN]), keep)  # the scale is nothing
    np.testing.assert_allclose(small, 0.25, rtol=1e-5)


def test_rows_whose_oldest_token_is_too_old_are_filtered():
    # oldest versions [5, 6, 7], now 7, at most 1 -> [0, 1, 1]; what is not an action may hold anything
    version = jnp.array([[-1, 7, 5, 7], [-1, 6, 7, 7], [-1, 7, 7, 0], [-1, -1, -1, -1]])
    action = jnp.array([[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]], bool)
    kept = jax.jit(filters.not_stale, static_argnames="most")(version, action, jnp.int32(7), most=1)
    np.testing.assert_array_equal(kept, [False, True, True, True])
    np.testing.assert_array_equal(filters.not_stale(version, action, jnp.int32(7), most=2), [True, True, True, True])
    np.testing.assert_array_equal(filters.not_stale(version, action, jnp.int32(7), most=0), [False, False, True, True])
    np.testing.assert_array_equal(filters.not_stale(version[None], action[None], jnp.int32(7), most=1)[0], kept)


def test_only_rows_cut_at_the_length_limit_are_filtered():
    finish = jnp.array([f.value for f in Finish], jnp.int8)
    got = jax.jit(filters.not_truncated)(finish)
    np.testing.assert_array_equal(got, [f != Finish.LENGTH for f in Finish])


def test_a_truncated_row_stays_in_its_groups_statistics():
    # R = [1, 0, 0, 1], row 2 truncated: its advantage is 0 - 0.5, and it is not trained on
    reward, group = jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.zeros(4, jnp.int32)
    row = advantages.group_centered(reward, group, jnp.ones(4, bool), num_groups=1)
    keep = filters.not_truncated(jnp.array([0, 0, Finish.LENGTH, 0], jnp.int8))
    np.testing.assert_array_equal(row, [0.5, -0.5, -0.5, 0.5])
    np.testing.assert_array_equal(keep, [True, True, False, True])
