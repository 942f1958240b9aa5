from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import length_rewards

NAN = float("nan")


def lam(length, correct, valid=None, group=None, reward=length_rewards.group_length_reward):
    rows = len(length)
    group = jnp.zeros(rows, jnp.int32) if group is None else jnp.array(group, jnp.int32)
    valid = jnp.ones(rows, bool) if valid is None else jnp.array(valid)
    run = jax.jit(functools.partial(reward, num_groups=2))
    return run(jnp.array(length), jnp.array(correct), group, valid)


def test_group_length_reward_by_hand():
    # 0.5 - (100 - 100) / (300 - 100) = 0.5; wrong: min(0, 0.5 - 100 / 200) = 0; 0.5 - 200 / 200 = -0.5
    np.testing.assert_allclose(lam([100, 200, 300], [True, False, True]), [0.5, 0, -0.5], rtol=1e-6)
    # A wrong answer is not rewarded for being short, min(0, 0.5) = 0, and is punished for being long:
    # 0.5 - (250 - 100) / 200 = -0.25
    np.testing.assert_allclose(lam([100, 250, 300], [False, False, True]), [0, -0.25, -0.5], rtol=1e-6)


def test_only_valid_rows_of_the_group_are_compared():
    length, correct = jnp.array([1, 3, NAN, 2, 7]), [True] * 5
    valid, group = [True, True, False, True, True], [0, 1, 0, 0, 1]
    np.testing.assert_allclose(lam(length, correct, valid, group), [0.5, 0.5, 0, -0.5, -0.5], rtol=1e-6)


def test_equal_lengths_and_groups_of_one_or_none_are_not_rewarded():
    np.testing.assert_array_equal(lam([7, 7, 7], [True, False, True]), [0, 0, 0])
    np.testing.assert_array_equal(lam([7, 9], [True, True], [True, False]), [0, 0])
    np.testing.assert_array_equal(lam([7, 9], [True, True], [False, False]), [0, 0])


def test_length_rewards_are_blind_to_a_common_length():
    length = np.array([3, 9, 4, 8])
    np.testing.assert_allclose(lam(length + 50, [True] * 4), lam(length, [True] * 4), atol=1e-6)
    assert float(lam(length, [True] * 4).sum()) == 0  # 0.5, -0.5, 1/3, -1/3


def test_conciseness_compares_correct_rows_alone_by_hand():
    concise = functools.partial(lam, reward=length_rewards.conciseness_reward)
    # Correct: 200 and 300. The wrong row of 100 neither counts nor earns.
    np.testing.assert_allclose(concise([100, 200, 300], [False, True, True]), [0, 0.5, -0.5], rtol=1e-6)
    np.testing.assert_array_equal(concise([100, 200, 300], [False, False, True]), [0, 0, 0])


def test_a_length_penalty_by_hand():
    # target 4: 3 and 4 are free; -(5 - 4) / 4 = -0.25; -(12 - 4) / 4 = -2
    got = jax.jit(length_rewards.length_penalty)(jnp.array([0, 3, 4, 5, 12]), target=4.0)
    np.testing.assert_allclose(got, [0, 0, 0, -0.25, -2], rtol=1e-6)
