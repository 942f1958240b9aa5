from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

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
