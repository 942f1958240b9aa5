from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import advantages, baselines

NAN = float("nan")


def jitted(fn):
    return jax.jit(fn, static_argnames="num_groups")


# A6


def test_greedy_baseline_by_hand():
    # Rewards 1 and 0 against a greedy 1: 0 and -1. The second prompt's greedy completion has no verdict.
    reward = jnp.array([1.0, 0.0, 1.0, 1.0, NAN])
    greedy = jnp.array([False, False, True, False, True])
    group = jnp.array([0, 0, 0, 1, 1], jnp.int32)
    found = jitted(baselines.greedy_baseline)(reward, greedy, group, ~jnp.isnan(reward), num_groups=2)
    np.testing.assert_array_equal(found, [0, -1, 0, 0, 0])


def test_greedy_baseline_needs_no_second_sample_and_its_own_row_gets_zero():
    # Prompts of one sample and a greedy row each, in any order: 3 - 1 and 0.5 - 2. A sample without a verdict gets 0.
    reward = jnp.array([1.0, 0.5, 3.0, 2.0, NAN])
    greedy = jnp.array([True, False, False, True, False])
    group = jnp.array([0, 1, 0, 1, 1], jnp.int32)
    found = baselines.greedy_baseline(reward, greedy, group, ~jnp.isnan(reward), num_groups=2)
    np.testing.assert_allclose(found, [0, -1.5, 2, 0, 0], rtol=1e-6)


def test_gradient_of_the_greedy_baseline():
    reward, greedy = jnp.array([1.0, 0.0, 0.5, NAN]), jnp.array([False, False, True, False])
    first = lambda r: baselines.greedy_baseline(r, greedy, jnp.zeros(4, jnp.int32), ~jnp.isnan(r), num_groups=1)[0]
    np.testing.assert_array_equal(jax.grad(first)(reward), [1, 0, -1, 0])


# A10, OPO


def test_length_weighted_by_hand():
    # Lengths 1 and 3, rewards 1 and 0: b = (1 * 1 + 3 * 0) / 4 = 0.25. Group 1: b = (2 * 4 + 6 * 8) / 8 = 7.
    reward, length = jnp.array([1.0, 4.0, 0.0, 8.0]), jnp.array([1, 2, 3, 6], jnp.int32)
    group = jnp.array([0, 1, 0, 1], jnp.int32)
    found = jitted(baselines.length_weighted)(reward, length, group, jnp.ones(4, bool), num_groups=2)
    np.testing.assert_allclose(found, [0.75, -3, -0.25, 1], rtol=1e-6)


def test_rows_of_one_length_are_only_centered():
    with jax.enable_x64(True):
        reward = jax.random.normal(jax.random.key(0), (6,), jnp.float64)
        group, valid = jnp.array([0, 1, 0, 1, 0, 1], jnp.int32), jnp.arange(6) != 3
        found = baselines.length_weighted(reward, jnp.full(6, 5), group, valid, num_groups=2)
        np.testing.assert_allclose(found, advantages.group_centered(reward, group, valid, num_groups=2), atol=1e-12)


def test_weighted_by_length_advantages_sum_to_zero():
    with jax.enable_x64(True):
        reward = jax.random.normal(jax.random.key(1), (5,), jnp.float64)
        length = jnp.array([1, 7, 2, 9, 4])
        found = baselines.length_weighted(reward, length, jnp.zeros(5, jnp.int32), jnp.ones(5, bool), num_groups=1)
        np.testing.assert_allclose(np.sum(found * length), 0, atol=1e-12)


def test_rows_without_a_verdict_or_a_token_set_no_baseline():
    reward, length = jnp.array([1.0, NAN, 9.0, 0.0]), jnp.array([1, 5, 0, 3], jnp.int32)
    valid = jnp.array([True, False, True, True])
    found = baselines.length_weighted(reward, length, jnp.zeros(4, jnp.int32), valid, num_groups=1)
    np.testing.assert_allclose(found, [0.75, 0, 0, -0.25], rtol=1e-6)


def test_equal_rewards_and_groups_of_one_get_exactly_zero():
    reward = jnp.array([0.1] * 7 + [5.0])
    length, group = jnp.array([1, 2, 3, 5, 7, 11, 13, 4], jnp.int32), jnp.array([0] * 7 + [1], jnp.int32)
    found = baselines.length_weighted(reward, length, group, jnp.ones(8, bool), num_groups=2)
    np.testing.assert_array_equal(found, np.zeros(8))


def test_gradient_of_the_length_weighted_baseline():
    # da_0/dR = [1 - 1/4, -3/4], nothing to a missing one
    reward, length = jnp.array([1.0, 0.0, NAN]), jnp.array([1, 3, 4], jnp.int32)
    valid = jnp.array([True, True, False])
    first = lambda r: baselines.length_weighted(r, length, jnp.zeros(3, jnp.int32), valid, num_groups=1)[0]
    np.testing.assert_allclose(jax.grad(first)(reward), [0.75, -0.75, 0], rtol=1e-6)


# A10, OTB

PROBABILITY = jnp.array([[0.5, 0.4], [0.8, 0.2]])
SUM_SQUARED = jnp.array([[0.5, 0.3], [0.7, 0.5]])
RETURNS = jnp.array([[1.0, 1.0], [0.0, 0.0]])
TWO = jnp.ones((2, 2), bool)


def test_token_optimal_by_hand():
    # 1 - 2 p + sum p^2: [0.5, 0.5] and [0.1, 1.1]; summed so far: [0.5, 1.0] and [0.1, 1.2].
    # b_0 = 0.5 / 0.6, b_1 = 1 / 2.2; rewards 1 and 0 less these.
    run = jitted(baselines.token_optimal)
    found = run(RETURNS, PROBABILITY, SUM_SQUARED, TWO, jnp.zeros(2, jnp.int32), jnp.ones(2, bool), num_groups=1)
    np.testing.assert_allclose(found, [[1 / 6, 6 / 11], [-5 / 6, -5 / 11]], rtol=1e-5)


def test_token_optimal_of_equal_norms_is_centering_by_column():
    with jax.enable_x64(True):
        returns = jax.random.normal(jax.random.key(2), (4, 3), jnp.float64)
        group = jnp.array([0, 1, 1, 0], jnp.int32)
        same = jnp.full((4, 3), 0.3)
        everything, rows = jnp.ones((4, 3), bool), jnp.ones(4, bool)
        found = baselines.token_optimal(returns, same, same, everything, group, rows, num_groups=2)
        for column in range(3):
            centered = advantages.group_centered(returns[:, column], group, rows, num_groups=2)
            np.testing.assert_allclose(found[:, column], centered, atol=1e-12)


def test_token_optimal_compares_the_rows_that_sampled_there():
    # Row 2 has no verdict and row 1 ends early: nothing to compare row 0's second token with. Padding may be NaN.
    mask = jnp.array([[True, True], [True, False], [True, True]])
    more = lambda x, fill: jnp.concatenate([x.at[1, 1].set(NAN), jnp.full((1, 2), fill)])
    found = baselines.token_optimal(
        more(RETURNS, NAN), more(PROBABILITY, NAN), more(SUM_SQUARED, NAN), mask, jnp.zeros(3, jnp.int32),
        jnp.array([True, True, False]), num_groups=1,
    )  # fmt: skip
    np.testing.assert_allclose(found, [[1 / 6, 0], [-5 / 6, 0], [0, 0]], rtol=1e-5)


def test_token_optimal_of_equal_returns_or_of_certain_tokens_is_exactly_zero():
    rows = jnp.zeros(2, jnp.int32), jnp.ones(2, bool)
    returns = jnp.full((2, 2), 0.1)
    np.testing.assert_array_equal(
        baselines.token_optimal(returns, PROBABILITY, SUM_SQUARED, TWO, *rows, num_groups=1), np.zeros((2, 2))
    )
    ones = jnp.ones((2, 2))  # a policy that is certain of every token has no gradient to weigh
    np.testing.assert_array_equal(
        baselines.token_optimal(RETURNS, ones, ones, TWO, *rows, num_groups=1), np.zeros((2, 2))
    )


def test_rounding_of_certain_tokens_keeps_the_token_optimal_baseline_among_the_returns():
    # p = 1, sum p^2 = 1 - 2^-24 and 1 + 2^-23, as two roundings of 1: norms -2^-24, which counts as 0, and 2^-23. So
    # the baseline is the return of the second row. With norms of both signs it would be -1 * 1 + 2 * 0 = -1.
    probability, sum_squared = jnp.ones((2, 1)), jnp.array([[1 - 2**-24], [1 + 2**-23]])
    returns, rows = jnp.array([[1.0], [0.0]]), (jnp.zeros(2, jnp.int32), jnp.ones(2, bool))
    found = baselines.token_optimal(returns, probability, sum_squared, jnp.ones((2, 1), bool), *rows, num_groups=1)
    np.testing.assert_array_equal(found, [[1], [0]])
    unknown = sum_squared.at[0, 0].set(NAN)
    found = baselines.token_optimal(returns, probability, unknown, jnp.ones((2, 1), bool), *rows, num_groups=1)
    assert jnp.isnan(found).all()


def test_token_optimal_of_many_columns_is_that_of_each():
    rng, (rows, length, prompts) = np.random.default_rng(0), (12, 2 * baselines.COLUMNS + 9, 3)
    returns, probability, sum_squared = rng.random((3, rows, length), np.float32)
    mask, valid = rng.random((rows, length)) < 0.8, rng.random(rows) < 0.9
    group, counts = rng.integers(0, prompts, rows, np.int32), mask & valid[:, None]
    weight = np.cumsum(np.where(counts, 1 - 2 * probability + sum_squared, 0).clip(0), axis=1)
    expected = np.zeros((rows, length))
    for prompt, column in itertools.product(range(prompts), range(length)):
        those = counts[:, column] & (group == prompt)
        if those.sum() > 1 and weight[those, column].sum() > 0:
            baseline = (returns * weight)[those, column].sum() / weight[those, column].sum()
            expected[those, column] = returns[those, column] - baseline
    run = jitted(baselines.token_optimal)
    found = run(returns, probability, sum_squared, mask, group, valid, num_groups=prompts)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_token_optimal_compares_few_columns_at_a_time():
    # All columns at once would be [rows, length, prompts], 16 MiB, in each of several comparisons.
    rows, length, prompts = 64, 2048, 32
    of = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    numbers, mask = of(rows, length), of(rows, length, dtype=bool)
    lowered = jitted(baselines.token_optimal).lower(
        numbers, numbers, numbers, mask, of(rows, dtype=jnp.int32), of(rows, dtype=bool), num_groups=prompts
    )
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 4 * rows * length * prompts / 2


@pytest.mark.parametrize("row, column", [(0, 0), (0, 1)])
def test_gradient_of_the_token_optimal_baseline(row, column):
    # da_0t/dRet = [1 - W_0 / (W_0 + W_1), -W_1 / (W_0 + W_1)] at its own column alone, W as above
    of = lambda r: baselines.token_optimal(
        r, PROBABILITY, SUM_SQUARED, TWO, jnp.zeros(2, jnp.int32), jnp.ones(2, bool), num_groups=1
    )[row, column]
    share = np.array([0.1 / 0.6, 1.2 / 2.2])[column]
    expected = np.zeros((2, 2))
    expected[:, column] = [share, -share]
    np.testing.assert_allclose(jax.grad(of)(RETURNS), expected, rtol=1e-5, atol=1e-7)
