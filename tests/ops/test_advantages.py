from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import advantages, reduce

NAN = float("nan")

ONE_GROUP = jnp.zeros(4, jnp.int32)
ALL = jnp.ones(4, bool)
REWARD = jnp.array([1.0, 0.0, 0.0, 1.0])

GROUP_FUNCTIONS = {
    "A3": advantages.group_zscore,
    "A4": advantages.group_centered,
    "A5": advantages.leave_one_out,
    "A9": advantages.group_mean_batch_std,
}


def jitted(fn):
    return jax.jit(fn, static_argnames="num_groups")


# A1


def test_returns_skip_tokens_the_policy_did_not_sample():
    # r = [0, -, 1], gamma = 0.9: Ret_2 = 1, Ret_0 = 0 + 0.9 * 1: the tool token between costs no discount
    reward, action = jnp.array([[0.0, NAN, 1.0]]), jnp.array([[True, False, True]])
    got = jax.jit(advantages.discounted_returns)(reward, action, discount=0.9)
    np.testing.assert_allclose(got, [[0.9, 0, 1]], rtol=1e-6)


def test_returns_accumulate_within_a_row_only():
    # row 0: 3, 2 + 0.5 * 3 = 3.5, 1 + 0.5 * 3.5 = 2.75; row 1: 6, 5 + 3 = 8, 4 + 4 = 8
    reward = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    got = advantages.discounted_returns(reward, jnp.ones((2, 3), bool), discount=0.5)
    np.testing.assert_allclose(got, [[2.75, 3.5, 3], [8, 8, 6]], rtol=1e-6)


def test_undiscounted_returns_are_reversed_cumulative_sums():
    with jax.enable_x64(True):
        reward = jax.random.normal(jax.random.key(0), (3, 7), jnp.float64)
        got = advantages.discounted_returns(reward, jnp.ones((3, 7), bool), discount=1.0)
        np.testing.assert_allclose(got, np.cumsum(reward[:, ::-1], axis=1)[:, ::-1], rtol=1e-12, atol=1e-12)


def test_gradient_of_returns_is_the_discount_and_nan_stays_out():
    action = jnp.array([[True, False, True, True]])
    first = lambda r: advantages.discounted_returns(r, action, discount=0.5)[0, 0]
    np.testing.assert_allclose(jax.grad(first)(jnp.array([[1.0, NAN, 1.0, 1.0]])), [[1, 0, 0.5, 0.25]], rtol=1e-6)


# A2


def test_moving_baseline_by_hand():
    # a = [1 - 0.2, 0 - 0.2]; b' = 0.95 * 0.2 + 0.05 * 0.5 = 0.215. The invalid row changes nothing.
    reward, valid = jnp.array([1.0, 0.0, NAN]), jnp.array([True, True, False])
    row, following = jax.jit(advantages.moving_baseline)(reward, valid, jnp.float32(0.2), decay=0.95)
    np.testing.assert_allclose(row, [0.8, -0.2, 0], rtol=1e-6)
    np.testing.assert_allclose(following, 0.215, rtol=1e-6)


def test_the_first_batch_is_its_own_baseline():
    row, following = advantages.moving_baseline(REWARD, ALL, jnp.float32(NAN), decay=0.95)
    np.testing.assert_allclose(row, [0.5, -0.5, -0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(following, 0.5, rtol=1e-6)


@pytest.mark.parametrize("baseline", [0.3, NAN])
def test_a_batch_without_a_valid_row_leaves_the_baseline(baseline):
    row, following = advantages.moving_baseline(REWARD * NAN, ~ALL, jnp.float32(baseline), decay=0.95)
    np.testing.assert_array_equal(row, [0, 0, 0, 0])
    np.testing.assert_array_equal(following, jnp.float32(baseline))


@pytest.mark.parametrize("value", [0.1, 0.4, 0.7, 1000.1])
@pytest.mark.parametrize("rows", [3, 7, 13, 48])
def test_the_rounding_of_a_mean_is_no_advantage(value, rows):
    # In float32, 7 times 0.7 has the mean 0.70000005, and 0.95 * 0.7 + 0.05 * 0.7 is not 0.7.
    reward, baseline = jnp.append(jnp.full(rows, value), NAN), jnp.float32(NAN)
    for _ in range(3):
        row, baseline = advantages.moving_baseline(reward, jnp.arange(rows + 1) < rows, baseline, decay=0.95)
        np.testing.assert_array_equal(row, 0)
        assert baseline == np.float32(value)


def test_a_baseline_at_the_mean_equals_centring():
    row, following = advantages.moving_baseline(REWARD, ALL, jnp.float32(0.5), decay=0.9)
    np.testing.assert_allclose(row, advantages.group_centered(REWARD, ONE_GROUP, ALL, num_groups=1), rtol=1e-6)
    np.testing.assert_allclose(following, 0.5, rtol=1e-6)


# A3, A4, A5, A9


@pytest.mark.parametrize(
    "name, expected",
    [
        # std1 = sqrt(4 * 0.25 / 3) = 0.57735; 0.5 / (0.57735 + 1e-6) = 0.866024
        ("A3", [0.866024, -0.866024, -0.866024, 0.866024]),
        ("A4", [0.5, -0.5, -0.5, 0.5]),  # 1 - 0.5
        ("A5", [2 / 3, -2 / 3, -2 / 3, 2 / 3]),  # 1 - (0 + 0 + 1) / 3; 0 - (1 + 0 + 1) / 3
    ],
)
def test_group_advantages_by_hand(name, expected):
    got = jitted(GROUP_FUNCTIONS[name])(REWARD, ONE_GROUP, ALL, num_groups=1)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_group_mean_batch_std_by_hand():
    # rewards 1, 0 | 1, 1: std1 of all four = sqrt((3 * 0.0625 + 0.5625) / 3) = 0.5; 0.5 / (0.5 + 1e-6) = 0.999998
    reward, group = jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([0, 0, 1, 1], jnp.int32)
    got = jitted(advantages.group_mean_batch_std)(reward, group, ALL, num_groups=2)
    np.testing.assert_allclose(got, [0.999998, -0.999998, 0, 0], rtol=1e-6)


def test_groups_do_not_see_each_other():
    # group 0: 4, 2 -> mean 3, std1 sqrt(2); group 1: 10, 30 -> mean 20, std1 sqrt(200)
    reward, group = jnp.array([4.0, 10.0, 2.0, 30.0]), jnp.array([0, 1, 0, 1], jnp.int32)
    of = lambda name: GROUP_FUNCTIONS[name](reward, group, ALL, num_groups=2)
    np.testing.assert_allclose(of("A3"), np.array([1, -1, -1, 1]) / np.sqrt(2), rtol=2e-6)
    np.testing.assert_allclose(of("A4"), [1, -10, -1, 10], rtol=1e-6)
    np.testing.assert_allclose(of("A5"), [2, -20, -2, 20], rtol=1e-6)


def test_the_epsilon_is_added_to_the_deviation():
    # std1 = 0.57735: 0.5 / (0.57735 + 1) = 0.316987
    got = advantages.group_zscore(REWARD, ONE_GROUP, ALL, num_groups=1, epsilon=1.0)
    np.testing.assert_allclose(got[0], 0.5 / (np.sqrt(1 / 3) + 1), rtol=1e-6)
    got = advantages.group_mean_batch_std(REWARD, ONE_GROUP, ALL, num_groups=1, epsilon=1.0)
    np.testing.assert_allclose(got[0], 0.5 / (np.sqrt(1 / 3) + 1), rtol=1e-6)


@pytest.mark.parametrize("name", GROUP_FUNCTIONS)
def test_a_group_of_equal_rewards_gets_exactly_zero(name):
    # E1. The float32 mean of seven 0.1s is not 0.1.
    reward, group = jnp.array([0.1] * 7 + [0.0, 1.0]), jnp.array([0] * 7 + [1] * 2, jnp.int32)
    got = GROUP_FUNCTIONS[name](reward, group, jnp.ones(9, bool), num_groups=2)
    assert jnp.all(got[:7] == 0)
    assert got[7] < 0 < got[8]


@pytest.mark.parametrize("name", GROUP_FUNCTIONS)
def test_a_group_of_one_gets_zero(name):
    # E2: also where it became one because the other row has no verdict (E3).
    reward, group = jnp.array([5.0, 1.0, NAN, 0.0]), jnp.array([0, 1, 1, 2], jnp.int32)
    valid = jnp.array([True, True, False, True])
    np.testing.assert_array_equal(GROUP_FUNCTIONS[name](reward, group, valid, num_groups=3), [0, 0, 0, 0])


@pytest.mark.parametrize("name", GROUP_FUNCTIONS)
def test_a_missing_reward_enters_no_statistic(name):
    fn = GROUP_FUNCTIONS[name]
    reward, valid = jnp.array([1.0, NAN, 0.0, 1.0, 0.0]), jnp.array([True, False, True, True, True])
    group = jnp.zeros(5, jnp.int32)
    got = fn(reward, group, valid, num_groups=1)
    without = fn(reward[valid], group[valid], valid[valid], num_groups=1)
    np.testing.assert_allclose(got, [without[0], 0, without[1], without[2], without[3]], rtol=1e-6)


@pytest.mark.parametrize("name", GROUP_FUNCTIONS)
def test_row_order_does_not_matter(name):
    with jax.enable_x64(True):
        fn = GROUP_FUNCTIONS[name]
        reward = jax.random.normal(jax.random.key(3), (9,), jnp.float64)
        group = jnp.array([0, 0, 0, 1, 1, 1, 2, 2, 2], jnp.int32)
        valid = jnp.arange(9) != 4
        order = jnp.array([8, 3, 1, 0, 5, 4, 2, 7, 6])
        straight = fn(reward, group, valid, num_groups=3)
        shuffled = fn(reward[order], group[order], valid[order], num_groups=3)
        np.testing.assert_allclose(shuffled, straight[order], rtol=1e-12, atol=1e-14)


def test_zscores_have_deviation_one_and_do_not_change_with_the_scale_of_rewards():
    with jax.enable_x64(True):
        reward = jax.random.normal(jax.random.key(4), (8,), jnp.float64)
        one, all_rows = jnp.zeros(8, jnp.int32), jnp.ones(8, bool)
        score = lambda r: advantages.group_zscore(r, one, all_rows, num_groups=1, epsilon=0.0)
        np.testing.assert_allclose(np.std(score(reward), ddof=1), 1, rtol=1e-12)
        np.testing.assert_allclose(score(reward * 10 + 3), score(reward), rtol=1e-11)


def test_leave_one_out_equals_the_difference_to_the_others():
    with jax.enable_x64(True):
        reward = jax.random.normal(jax.random.key(5), (5,), jnp.float64)
        got = advantages.leave_one_out(reward, jnp.zeros(5, jnp.int32), jnp.ones(5, bool), num_groups=1)
        others = [np.mean(np.delete(np.asarray(reward), i)) for i in range(5)]
        np.testing.assert_allclose(got, reward - jnp.array(others), rtol=1e-12)


def test_gradient_of_centring_is_the_identity_less_the_mean():
    # d a_0 / d R = [1 - 1/3, -1/3, -1/3], and nothing to the NaN of the row without a verdict
    reward, valid = jnp.array([1.0, 0.0, 3.0, NAN]), jnp.array([True, True, True, False])
    for fn, scale in ((advantages.group_centered, 1.0), (advantages.leave_one_out, 1.5)):
        gradient = jax.grad(lambda r, fn=fn: fn(r, ONE_GROUP, valid, num_groups=1)[0])(reward)
        np.testing.assert_allclose(gradient, np.array([2 / 3, -1 / 3, -1 / 3, 0]) * scale, rtol=1e-6)


# A7, A8


def test_whitened_returns_by_hand():
    # rewards 1 and 0 on the last of two tokens: returns 1, 1, 0, 0; 0.5 / sqrt(1/3 + 1e-8) = 0.866025
    reward = jnp.array([[0.0, 1.0, NAN], [0.0, 0.0, NAN], [NAN, NAN, NAN]])
    action = jnp.array([[True, True, False], [True, True, False], [True, True, True]])
    valid = jnp.array([True, True, False])
    got = jax.jit(advantages.whitened_returns)(reward, action, valid, discount=1.0)
    s = 0.8660254
    np.testing.assert_allclose(got, [[s, s, 0], [-s, -s, 0], [0, 0, 0]], rtol=1e-6)


def test_whitened_returns_of_equal_rewards_are_exactly_zero():
    reward = jnp.zeros((3, 7)).at[:, -1].set(0.1)
    got = advantages.whitened_returns(reward, jnp.ones((3, 7), bool), jnp.ones(3, bool), discount=1.0)
    assert jnp.all(got == 0)


def test_whitened_centered_by_hand():
    # groups [1, 0], [1, 1], one token each: centered [.5, -.5, 0, 0]; var1 = 0.5 / 3; 0.5 / sqrt(1/6) = 1.224745
    reward, group = jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([0, 0, 1, 1], jnp.int32)
    action = jnp.array([[True, False]] * 4)
    got = jitted(advantages.whitened_centered)(reward, group, ALL, action, num_groups=2)
    np.testing.assert_allclose(got, [[1.2247449, 0], [-1.2247449, 0], [0, 0], [0, 0]], rtol=1e-6)


def test_whitened_centered_keeps_rows_without_a_verdict_out():
    reward, group = jnp.array([1.0, 0.0, 1.0, 1.0, NAN]), jnp.array([0, 0, 1, 1, 1], jnp.int32)
    valid = jnp.array([True] * 4 + [False])
    got = advantages.whitened_centered(reward, group, valid, jnp.ones((5, 1), bool), num_groups=2)
    np.testing.assert_allclose(got[:, 0], [1.2247449, -1.2247449, 0, 0, 0], rtol=1e-6)


def test_whitened_returns_with_centred_rewards_equal_whitened_centered():
    reward, group = jnp.array([3.0, 1.0, 0.0, 1.0]), jnp.array([0, 0, 1, 1], jnp.int32)
    action = jnp.array([[True, True], [True, False], [True, True], [True, True]])
    centered = advantages.group_centered(reward, group, ALL, num_groups=2)
    last = jnp.array([1, 0, 1, 1])
    token_reward = jnp.where(jnp.arange(2)[None, :] == last[:, None], centered[:, None], 0)
    np.testing.assert_allclose(
        advantages.whitened_returns(token_reward, action, ALL, discount=1.0),
        advantages.whitened_centered(reward, group, ALL, action, num_groups=2),
        rtol=1e-6,
    )


# A23 and the way to tokens


def test_clip_by_hand():
    np.testing.assert_array_equal(advantages.clip_advantages(jnp.array([3.0, -1.0, -5.0]), limit=2.0), [2, -1, -2])
    assert advantages.clip_advantages(jnp.ones(2, jnp.bfloat16), limit=2.0).dtype == jnp.float32


def test_spread_puts_a_row_on_its_sampled_tokens_only():
    action = jnp.array([[False, True, True], [False, False, True]])
    np.testing.assert_array_equal(advantages.spread(jnp.array([0.5, -2.0]), action), [[0, 0.5, 0.5], [0, 0, -2]])


# A12


def test_component_zscores_by_hand():
    # Accuracy [1, 0]: std1 = 0.707107, z = +-0.707106; the format is equal in both rows and adds 0; weights 1 and 0.5.
    components, weights = jnp.array([[1.0, 0.0], [1.0, 1.0]]), jnp.array([1.0, 0.5])
    run = jitted(advantages.component_zscores)
    rows = jnp.zeros(2, jnp.int32), jnp.ones(2, bool)
    found = run(components, weights, *rows, num_groups=1)
    np.testing.assert_allclose(found, [0.707106, -0.707106], rtol=1e-6)
    # A second one that does differ, of another scale: -0.5 * 0.707107 in the first row.
    found = run(components.at[1].set(jnp.array([0.0, 100.0])), weights, *rows, num_groups=1)
    np.testing.assert_allclose(found, [0.707106 - 0.5 * 0.707107, 0.5 * 0.707107 - 0.707106], rtol=1e-5)


def test_one_component_is_grpo_and_a_missing_one_leaves_its_own_statistics_alone():
    group, valid = jnp.array([0, 0, 0, 1, 1], jnp.int32), jnp.array([True, True, True, True, False])
    first = jnp.array([1.0, 0.0, 1.0, 1.0, NAN])
    zscore = lambda x, rows: advantages.group_zscore(x, group, rows, num_groups=2)
    one = advantages.component_zscores(first[None], jnp.array([2.0]), group, valid, num_groups=2)
    np.testing.assert_allclose(one, 2 * zscore(first, valid), rtol=1e-6)
    second = jnp.array([3.0, NAN, 5.0, 1.0, NAN])  # a verifier that does not apply to the second row
    both = advantages.component_zscores(jnp.stack([first, second]), jnp.ones(2), group, valid, num_groups=2)
    expected = zscore(first, valid) + zscore(second, valid & ~jnp.isnan(second))
    np.testing.assert_allclose(both, expected, rtol=1e-6)
    assert jnp.all(jnp.isfinite(both)) and both[1] == zscore(first, valid)[1]


def test_components_of_any_scale_weigh_alike():
    with jax.enable_x64(True):
        components = jax.random.normal(jax.random.key(6), (2, 6), jnp.float64)
        group, rows = jnp.array([0, 1, 0, 1, 0, 1], jnp.int32), jnp.ones(6, bool)
        run = lambda x: advantages.component_zscores(x, jnp.ones(2), group, rows, num_groups=2, epsilon=0.0)
        scaled = components * jnp.array([[100.0], [0.01]]) + 3
        np.testing.assert_allclose(run(scaled), run(components), rtol=1e-10)


# A23 by task


def test_whiten_by_task_by_hand():
    # Task 0: 1, 1, 0, 0 (var1 = 1/3): +-0.5 / sqrt(1/3) = 0.866025. Task 1: 10 and 30, mean 20, var1 = 200:
    # +-0.707107. The last row's token is masked.
    x = jnp.array([[1.0, 1.0, NAN], [10.0, NAN, NAN], [0.0, 0.0, NAN], [30.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = jnp.array(
        [[True, True, False], [True, False, False], [True, True, False], [True, False, False], [False] * 3]
    )
    task = jnp.array([0, 1, 0, 1, 1], jnp.int32)
    found = jax.jit(advantages.whiten_by_task, static_argnames="num_tasks")(x, task, mask, num_tasks=2)
    s, r = 0.8660254, 0.70710678
    np.testing.assert_allclose(found, [[s, s, 0], [-r, 0, 0], [-s, -s, 0], [r, 0, 0], [0, 0, 0]], rtol=1e-6)


def test_one_task_is_whitening_and_equal_advantages_are_exactly_zero():
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(7), (5, 4), jnp.float64)
        mask = jnp.ones((5, 4), bool).at[2].set(False).at[3, 1:].set(False)
        one = jnp.zeros(5, jnp.int32)
        found = advantages.whiten_by_task(x, one, mask, num_tasks=1)
        np.testing.assert_allclose(found, reduce.whiten(x, mask), rtol=1e-12, atol=1e-13)
    x = jnp.full((3, 7), 0.1).at[2].set(jnp.arange(7.0))
    found = advantages.whiten_by_task(x, jnp.array([0, 0, 1], jnp.int32), jnp.ones((3, 7), bool), num_tasks=2)
    assert jnp.all(found[:2] == 0) and jnp.all(jnp.diff(found[2]) > 0)
    # Below 0 as well, with tokens that are masked.
    x, mask = jnp.full((1, 8), -0.4).at[0, 7].set(NAN), jnp.arange(8)[None] < 7
    assert jnp.all(advantages.whiten_by_task(x, jnp.zeros(1, jnp.int32), mask, num_tasks=1) == 0)


def test_nan_in_the_reward_of_a_token_stays_in_what_is_made_of_it():
    reward = jnp.array([[0.0, NAN], [0.0, 1.0]])  # such as by the KL to a reference whose log-probs are NaN
    tokens, rows = jnp.ones((2, 2), bool), jnp.ones(2, bool)
    assert jnp.isnan(advantages.whitened_returns(reward, tokens, rows, discount=1.0)).all()
    by_task = advantages.whiten_by_task(reward, jnp.array([0, 1], jnp.int32), tokens, num_tasks=2)
    np.testing.assert_array_equal(jnp.isnan(by_task), [[True, True], [False, False]])
    group = jnp.zeros(2, jnp.int32)
    assert jnp.isnan(advantages.leave_one_out(reward.sum(1), group, rows, num_groups=1)).all()


def test_gradient_of_whitening_by_task_sums_to_zero_and_skips_what_is_masked():
    # Adding a constant to a task's advantages changes nothing.
    x = jnp.array([[1.0, 0.5, NAN], [0.2, NAN, NAN], [9.0, 3.0, 1.0]])
    mask, task = ~jnp.isnan(x), jnp.array([0, 0, 1], jnp.int32)
    gradient = jax.grad(lambda x: advantages.whiten_by_task(x, task, mask, num_tasks=2)[0, 0])(x)
    assert gradient[0, 0] > 0 and jnp.all(gradient[2] == 0) and jnp.all(gradient[~mask] == 0)
    np.testing.assert_allclose(gradient.sum(), 0, atol=1e-6)
