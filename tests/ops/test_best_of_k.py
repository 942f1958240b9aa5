from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import advantages, best_of_k

NAN = float("nan")
ALL, ONE_GROUP = jnp.ones(4, bool), jnp.zeros(4, jnp.int32)
pass_at_k = jax.jit(best_of_k.pass_at_k, static_argnames=("num_groups", "k"))


def test_pass_at_k_by_hand():
    # One of four is right, k = 2: right 2/4; wrong 2/4 (1 - C(2, 1) / C(3, 1)) = 1/6; mean (0.5 + 3/6) / 4 = 0.25.
    correct = jnp.array([False, True, False, False])
    found = pass_at_k(correct, ONE_GROUP, ALL, num_groups=1, k=2)
    np.testing.assert_allclose(found, [-1 / 12, 0.25, -1 / 12, -1 / 12], rtol=1e-6)
    # Two of six, k = 3: right 3/6; wrong 3/6 (1 - C(3, 2) / C(5, 2)) = 0.35; mean (2 * 0.5 + 4 * 0.35) / 6 = 0.4.
    correct = jnp.arange(6) < 2
    found = pass_at_k(correct, jnp.zeros(6, jnp.int32), jnp.ones(6, bool), num_groups=1, k=3)
    np.testing.assert_allclose(found, [0.1, 0.1, -0.05, -0.05, -0.05, -0.05], rtol=1e-5)


def test_with_k_1_it_is_the_centered_reward_over_the_group():
    correct = jnp.array([True, False, False, True])
    centered = advantages.group_centered(correct.astype(jnp.float32), ONE_GROUP, ALL, num_groups=1)
    np.testing.assert_allclose(pass_at_k(correct, ONE_GROUP, ALL, num_groups=1, k=1), centered / 4, rtol=1e-6)


@pytest.mark.parametrize("n, k, p", [(4, 2, 0.3), (5, 3, 0.2), (4, 4, 0.6), (3, 1, 0.5)])
def test_its_expectation_is_the_gradient_of_pass_at_k(n, k, p):
    # A policy that is right with probability p = sigmoid(x): d log p / dx = 1 - p where right, -p where wrong. pass@k
    # is 1 - (1 - p)^k, of derivative k (1 - p)^(k - 1) * p (1 - p). Summed over all outcomes of n draws. The mean of a
    # group holds the row itself, which takes a share k / n of the gradient.
    with jax.enable_x64(True):
        expected = (1 - k / n) * k * (1 - p) ** k * p
        total = 0.0
        for outcome in itertools.product([True, False], repeat=n):
            found = best_of_k.pass_at_k(
                jnp.array(outcome), jnp.zeros(n, jnp.int32), jnp.ones(n, bool), num_groups=1, k=k
            )
            chance = np.prod(np.where(outcome, p, 1 - p))
            total += chance * np.sum(np.asarray(found) * np.where(outcome, 1 - p, -p))
        np.testing.assert_allclose(total, expected, rtol=1e-12, atol=1e-15)


def test_where_any_k_rows_hold_a_right_one_all_get_exactly_zero():
    # Three right of four: every two rows hold a right one. None right: nothing to share. Likewise all right.
    for right in (3, 0, 4):
        found = pass_at_k(jnp.arange(4) < right, ONE_GROUP, ALL, num_groups=1, k=2)
        np.testing.assert_array_equal(found, [0, 0, 0, 0])
    assert jnp.all(pass_at_k(jnp.arange(4) < 2, ONE_GROUP, ALL, num_groups=1, k=2) != 0)


def test_a_group_with_fewer_rows_than_k_gets_zero():
    # Group 0 has lost a row and has two left, group 1 all three; k = 3.
    group = jnp.array([0, 1, 0, 1, 0, 1], jnp.int32)
    correct = jnp.array([True, True, False, False, True, False])
    valid = jnp.array([True, True, True, True, False, True])
    # Of group 1: right 3/3; wrong 3/3 (1 - C(1, 2) / C(2, 2)) = 1: any three hold the right one.
    np.testing.assert_array_equal(pass_at_k(correct, group, valid, num_groups=2, k=3), np.zeros(6))
    found = pass_at_k(correct, group, valid, num_groups=2, k=2)
    # Group 0, n = 2: any two hold it. Group 1, n = 3: right 2/3; wrong 2/3 (1 - C(1, 1) / C(2, 1)) = 1/3; mean 4/9.
    np.testing.assert_allclose(found, [0, 2 / 9, 0, -1 / 9, 0, -1 / 9], rtol=1e-6)


def test_best_minus_second_by_hand():
    # 3 against 1.5: the lead is 1.5. A row without a verdict is no second.
    reward, valid = jnp.array([1.0, 3.0, NAN, 1.5, 0.0]), jnp.array([True, True, False, True, True])
    run = jax.jit(best_of_k.best_minus_second, static_argnames="num_groups")
    np.testing.assert_allclose(run(reward, jnp.zeros(5, jnp.int32), valid, num_groups=1), [0, 1.5, 0, 0, 0], rtol=1e-6)
    # Two best rows, a group of one, and equal rewards: 0.
    reward = jnp.array([1.0, 1.0, 0.0, 7.0, 0.1, 0.1])
    group = jnp.array([0, 0, 0, 1, 2, 2], jnp.int32)
    np.testing.assert_array_equal(run(reward, group, jnp.ones(6, bool), num_groups=3), np.zeros(6))
    # A negative best still leads.
    np.testing.assert_allclose(
        run(jnp.array([-2.0, -1.0]), jnp.zeros(2, jnp.int32), jnp.ones(2, bool), num_groups=1), [0, 1]
    )


def test_relative_to_mean_by_hand():
    # (1 - 0.25) / 0.25 = 3, (0 - 0.25) / 0.25 = -1; a group without a right answer 0, and one below 0.
    reward = jnp.array([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, -3.0, 1.0])
    group = jnp.array([0, 0, 0, 0, 1, 1, 2, 2], jnp.int32)
    run = jax.jit(best_of_k.relative_to_mean, static_argnames="num_groups")
    np.testing.assert_allclose(run(reward, group, jnp.ones(8, bool), num_groups=3), [3, -1, -1, -1, 0, 0, 0, 0], 1e-6)


def test_relative_to_mean_does_not_change_with_the_scale():
    with jax.enable_x64(True):
        reward = jax.random.uniform(jax.random.key(0), (6,), jnp.float64)
        run = lambda r: best_of_k.relative_to_mean(r, jnp.zeros(6, jnp.int32), jnp.ones(6, bool), num_groups=1)
        np.testing.assert_allclose(run(reward * 10), run(reward), rtol=1e-12)
        np.testing.assert_allclose(run(reward) * np.mean(reward), reward - np.mean(reward), rtol=1e-12, atol=1e-12)


FUNCTIONS = {
    "pass_at_k": lambda reward, *rest, **named: best_of_k.pass_at_k(reward > 0.5, *rest, **named, k=2),
    "best_minus_second": best_of_k.best_minus_second,
    "relative_to_mean": best_of_k.relative_to_mean,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_missing_reward_enters_no_statistic_and_order_does_not_matter(name):
    reward = jnp.array([1.0, NAN, 0.0, 0.2, 0.0, 0.9, 0.1, 0.4])
    group = jnp.array([0, 0, 0, 0, 0, 1, 1, 1], jnp.int32)
    valid = ~jnp.isnan(reward)
    found = FUNCTIONS[name](reward, group, valid, num_groups=2)
    assert jnp.any(found != 0) and found[1] == 0
    without = FUNCTIONS[name](reward[valid], group[valid], valid[valid], num_groups=2)
    np.testing.assert_allclose(found[valid], without, rtol=1e-6)
    order = jnp.array([7, 2, 0, 5, 1, 4, 6, 3])
    shuffled = FUNCTIONS[name](reward[order], group[order], valid[order], num_groups=2)
    np.testing.assert_allclose(shuffled, found[order], rtol=1e-6)


def test_gradients_are_those_of_the_formula_and_nan_stays_out():
    # a_0 = R_0 - R_2: d = [1, 0, -1]; MaxRL: a_0 = R_0 / m - 1 with m = 2/3, d = [1/m - 1/(3 m^2), -1/(3 m^2), ...]
    reward, valid, one = jnp.array([1.0, 0.4, 0.6, NAN]), jnp.array([True] * 3 + [False]), jnp.zeros(4, jnp.int32)
    first = lambda fn: jax.grad(lambda r: fn(r, one, valid, num_groups=1)[0])(reward)
    np.testing.assert_allclose(first(best_of_k.best_minus_second), [1, 0, -1, 0], rtol=1e-6)
    np.testing.assert_allclose(first(best_of_k.relative_to_mean), [0.75, -0.75, -0.75, 0], rtol=1e-5)
