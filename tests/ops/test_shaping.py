from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from narrow_inputs import check_widens

from jrl.ops import advantages, shaping

NAN = float("nan")


def test_soft_overlong_by_hand():
    # Lmax 20480, buffer 4096: 16384 -> 0; 18432 -> (16384 - 18432) / 4096 = -0.5; 20480 -> -1; 30000 capped at -1
    length = jnp.array([0, 16384, 18432, 20480, 30000], jnp.int32)
    got = jax.jit(shaping.soft_overlong, static_argnames=("max_completion", "buffer"))(
        length, max_completion=20480, buffer=4096
    )
    np.testing.assert_allclose(got, [0, 0, -0.5, -1, -1], rtol=1e-6)


def test_the_penalty_scales_it():
    got = shaping.soft_overlong(jnp.array([7, 8], jnp.int32), max_completion=8, buffer=2, penalty=0.5)
    np.testing.assert_allclose(got, [-0.25, -0.5], rtol=1e-6)


def test_a_buffer_of_the_whole_length_punishes_in_proportion():
    length = jnp.arange(9)
    got = shaping.soft_overlong(length, max_completion=8, buffer=8)
    np.testing.assert_allclose(got, -np.arange(9) / 8, rtol=1e-6, atol=1e-7)


def test_soft_overlong_slope_is_one_over_the_buffer():
    slope = jax.grad(lambda n: shaping.soft_overlong(n, max_completion=8, buffer=4).sum())(jnp.array([2.0, 6.5, 9.0]))
    np.testing.assert_allclose(slope, [0, -0.25, 0], rtol=1e-6)


def test_kl_in_the_reward_by_hand():
    # lp [-1, -2], ref [-1.5, -1.8], R = 1, beta 0.1: -0.1 * 0.5 = -0.05; 1 - 0.1 * -0.2 = 1.02. Prompt and pad: 0
    old, reference = jnp.array([[NAN, -1.0, -2.0, NAN]]), jnp.array([[NAN, -1.5, -1.8, NAN]])
    action = jnp.array([[False, True, True, False]])
    got = jax.jit(shaping.kl_in_reward)(jnp.array([1.0]), old, reference, action, beta=0.1)
    np.testing.assert_allclose(got, [[0, -0.05, 1.02, 0]], rtol=1e-6, atol=1e-7)
    total = lambda lp: shaping.kl_in_reward(jnp.array([1.0]), lp, reference, action, beta=0.1).sum()
    np.testing.assert_array_equal(jax.grad(total)(old), 0)


def test_kl_in_the_reward_by_other_estimators_by_hand():
    # d = 0.5 and -0.2, beta 0.1, R = 1. k2: 0.5^2 / 2 = 0.125, 0.2^2 / 2 = 0.02; k3: exp(-0.5) - 1 + 0.5 = 0.10653,
    # exp(0.2) - 1 - 0.2 = 0.02140. A prompt's token and padding have none.
    old, reference = jnp.array([[NAN, -1.0, -2.0, NAN]]), jnp.array([[NAN, -1.5, -1.8, NAN]])
    action, run = jnp.array([[False, True, True, False]]), jax.jit(shaping.kl_in_reward, static_argnames="estimator")
    for estimator, penalties in (("k2", (0.125, 0.02)), ("k3", (0.10653, 0.02140))):
        got = run(jnp.array([1.0]), old, reference, action, beta=0.1, estimator=estimator)
        np.testing.assert_allclose(got, [[0, -0.1 * penalties[0], 1 - 0.1 * penalties[1], 0]], atol=1e-6)
        total = lambda lp, by=estimator: run(jnp.ones(1), lp, reference, action, beta=0.1, estimator=by).sum()
        np.testing.assert_array_equal(jax.grad(total)(old), 0)
    by_default = shaping.kl_in_reward(jnp.array([1.0]), old, reference, action, beta=0.1)
    np.testing.assert_array_equal(run(jnp.array([1.0]), old, reference, action, beta=0.1, estimator="k1"), by_default)


def test_its_returns_sum_the_penalties_and_the_reward():
    with jax.enable_x64(True):
        old, reference = jax.random.normal(jax.random.key(0), (2, 3, 5), jnp.float64)
        action, reward = jnp.arange(5)[None, :] < jnp.array([[5], [3], [1]]), jnp.array([1.0, 2.0, 3.0])
        tokens = shaping.kl_in_reward(reward, old, reference, action, beta=0.3)
        returns = advantages.discounted_returns(tokens, action, discount=1.0)
        total = reward - 0.3 * jnp.where(action, old - reference, 0).sum(-1)
        np.testing.assert_allclose(returns[:, 0], total, rtol=1e-12)


def test_a_row_without_a_token_carries_no_reward():
    none = jnp.zeros((1, 3), bool)
    got = shaping.kl_in_reward(jnp.array([5.0]), jnp.ones((1, 3)), jnp.zeros((1, 3)), none, beta=0.1)
    np.testing.assert_array_equal(got, [[0, 0, 0]])


def test_rewards_carry_no_gradient():
    action = jnp.ones((1, 2), bool)
    total = lambda old: shaping.kl_in_reward(jnp.ones(1), old, jnp.zeros((1, 2)), action, beta=0.1).sum()
    np.testing.assert_array_equal(jax.grad(total)(jnp.ones((1, 2))), 0)


def test_the_last_action_is_the_last_one_sampled_even_after_tool_output():
    action = jnp.array([[False, True, True, False], [True, False, True, False], [False] * 4, [True] * 4])
    expected = [[False, False, True, False], [False, False, True, False], [False] * 4, [False, False, False, True]]
    np.testing.assert_array_equal(shaping.last_action(action), expected)


def test_rewards_are_clipped_by_hand():
    got = jax.jit(shaping.clip_reward)(jnp.array([-3.0, -2.0, 0.5, 7.0, NAN]), limit=2.0)
    np.testing.assert_array_equal(got, [-2, -2, 0.5, 2, NAN])
    assert shaping.clip_reward(jnp.ones(1, jnp.bfloat16), limit=2.0).dtype == jnp.float32


def test_whitened_rewards_keep_their_mean_by_hand():
    # r = [1, 3]: mean 2, std 1.41421 (n - 1): (1 - 2) / 1.41421 + 2 = 1.29289, (3 - 2) / 1.41421 + 2 = 2.70711
    token_reward, mask = jnp.array([[1.0, NAN], [NAN, 3.0]]), jnp.array([[True, False], [False, True]])
    got = jax.jit(shaping.whiten_rewards)(token_reward, mask)
    np.testing.assert_allclose(got, [[1.29289, 0], [0, 2.70711]], atol=1e-5)


def test_whitened_rewards_have_variance_one_and_the_mean_that_they_had():
    with jax.enable_x64(True):
        r, mask = (
            jax.random.normal(jax.random.key(1), (3, 5), jnp.float64),
            jnp.arange(5)[None, :] < jnp.array([[5], [3], [1]]),
        )
        got = np.asarray(shaping.whiten_rewards(7 * r - 3, mask))[np.asarray(mask)]
        assert got.dtype == np.float64
        np.testing.assert_allclose(got.mean(), np.asarray(7 * r - 3)[np.asarray(mask)].mean(), rtol=1e-12)
        np.testing.assert_allclose(got.var(ddof=1), 1, rtol=1e-8)


def test_rewards_that_are_all_equal_are_not_whitened():
    one, none = jnp.array([[True, False]]), jnp.zeros((1, 2), bool)
    np.testing.assert_array_equal(shaping.whiten_rewards(jnp.array([[5.0, NAN]]), one), [[5, 0]])
    np.testing.assert_array_equal(
        shaping.whiten_rewards(jnp.array([[0.1, 0.1]]), jnp.ones((1, 2), bool)), np.float32([[0.1, 0.1]])
    )
    np.testing.assert_array_equal(shaping.whiten_rewards(jnp.full((1, 2), NAN), none), [[0, 0]])
    # seven times 0.4 over 7 is 0.40000004 in float32
    seven = jnp.full((1, 7), 0.4)
    np.testing.assert_array_equal(shaping.whiten_rewards(seven, jnp.ones((1, 7), bool)), seven)
    beside = jnp.concatenate([seven, jnp.full((1, 1), NAN)], axis=1), jnp.arange(8)[None] < 7
    np.testing.assert_array_equal(shaping.whiten_rewards(*beside)[:, :7], seven)


def test_exploration_is_mixed_in_by_hand():
    # 0.8 * 1 + 0.2 * 0.5 = 0.9. What explores beyond 1 or below 0 counts as 1 or 0.
    got = jax.jit(shaping.exploration_mix)(jnp.array([1.0, 0.0, 1.0]), jnp.array([0.5, 3.0, -1.0]), share=0.8)
    np.testing.assert_allclose(got, [0.9, 0.2, 0.8], rtol=1e-6)
    mix = lambda r, e: shaping.exploration_mix(r, e, share=0.8)
    check_widens(mix, jnp.array([0.9, 0.3]), jnp.array([0.7, 0.1]))


def test_a_progress_bonus_by_hand():
    # wrong, right: 1 + 10 * 1 = 11; right, wrong: 0 + 10 * -1 = -10; right, right: 1; wrong, wrong: 0
    first, second = jnp.array([0.0, 1.0, 1.0, 0.0]), jnp.array([1.0, 0.0, 1.0, 0.0])
    np.testing.assert_allclose(jax.jit(shaping.progress_bonus)(first, second, coefficient=10.0), [11, -10, 1, 0])
    check_widens(lambda a, b: shaping.progress_bonus(a, b, coefficient=0.3), jnp.array([0.9]), jnp.array([0.7]))


def test_rewards_of_attempts_are_on_the_last_token_of_each():
    # Columns: prompt, two tokens of turn 0, a user's token, two of turn 1. The second row's second attempt is missing,
    # whose reward may be anything; the third row's first attempt is.
    action = jnp.array([[0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0]], bool)
    turn = jnp.array([[9, 0, 0, 1, 1, 1]] * 3, jnp.int8)
    run = jax.jit(shaping.attempt_rewards)
    got = run(jnp.array([0.25, 1.0, 0.5]), jnp.array([1.0, NAN, 1.0]), action, turn, coefficient=2.0)
    # 1 + 2 * 0.75 = 2.5; 1 + 2 * 0.5 = 2
    np.testing.assert_allclose(got, [[0, 0, 0.25, 0, 0, 2.5], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 2, 0]])
    total = lambda first: shaping.attempt_rewards(first, jnp.ones(3), action, turn, coefficient=2.0).sum()
    np.testing.assert_array_equal(jax.grad(total)(jnp.ones(3)), 0)


def test_potential_shaping_by_hand():
    # Phi = 0, 0.4, 0.9 and R = 1 at the end: 0 + 0.4 - 0; 0 + 0.9 - 0.4; 1 + 0 - 0.9. Tokens between are no actions.
    reward, potential = jnp.array([[NAN, 0, 0, NAN, 1.0]]), jnp.array([[NAN, 0, 0.4, NAN, 0.9]])
    action = jnp.array([[False, True, True, False, True]])
    got = jax.jit(shaping.potential_shaping)(reward, potential, action, discount=1.0)
    np.testing.assert_allclose(got, [[0, 0.4, 0.5, 0, 0.1]], rtol=1e-5)
    # discount 0.5: 0.2 - 0; 0.45 - 0.4; 1 - 0.9
    got = shaping.potential_shaping(reward, potential, action, discount=0.5)
    np.testing.assert_allclose(got, [[0, 0.2, 0.05, 0, 0.1]], rtol=1e-5)


def test_a_shaped_return_is_the_return_less_the_potential_of_its_state():
    with jax.enable_x64(True):
        reward, potential = jax.random.normal(jax.random.key(0), (2, 3, 5), jnp.float64)
        action = jnp.array([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]], bool)
        shaped = shaping.potential_shaping(reward, potential, action, discount=0.9)
        returns = lambda r: advantages.discounted_returns(r, action, discount=0.9)
        difference = returns(shaped) - returns(jnp.where(action, reward, 0))
        np.testing.assert_allclose(difference, jnp.where(action, -potential, 0), atol=1e-12)


def test_a_row_whose_potential_is_unknown_is_not_shaped_and_there_is_no_gradient():
    action = jnp.ones((2, 2), bool)
    potential = jnp.array([[0.5, NAN], [0.5, 0.25]])
    got = shaping.potential_shaping(jnp.ones((2, 2)), potential, action, discount=1.0)
    np.testing.assert_allclose(got, [[1, 1], [0.75, 0.75]])
    check_widens(
        lambda r, phi: shaping.potential_shaping(r, phi, action[:1], discount=0.9),
        jnp.array([[0.9, 0.3]]),
        jnp.array([[0.7, 0.1]]),
    )
    total = lambda phi: shaping.potential_shaping(jnp.ones((2, 2)), phi, action, discount=1.0).sum()
    np.testing.assert_array_equal(jax.grad(total)(potential), 0)
