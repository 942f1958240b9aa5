from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import stored_advantages

NAN = float("nan")
REWARD, VALUE = jnp.array([0.9, 0.4, 0.7]), jnp.array([0.5, 0.5, 0.5])


def test_better_than_expected_by_hand():
    # 0.4, -0.1 (dropped), 0.2
    found = jax.jit(stored_advantages.better_than_expected)(REWARD, VALUE, jnp.ones(3, bool))
    np.testing.assert_allclose(found, [0.4, 0, 0.2], rtol=1e-6)


def test_rows_without_a_reward_are_dropped():
    reward, value = jnp.array([0.9, NAN, 0.7, 9.0]), jnp.array([0.5, 0.1, 0.5, NAN])
    valid = jnp.array([True, False, True, False])
    found = stored_advantages.better_than_expected(reward, value, valid)
    np.testing.assert_allclose(found, [0.4, 0, 0.2, 0], rtol=1e-6)
    gradient = jax.grad(lambda r: stored_advantages.better_than_expected(r, value, valid).sum())(reward)
    np.testing.assert_array_equal(gradient, [1, 0, 1, 0])


def test_sampling_probabilities_by_hand():
    # 0.4 and 0.2 of 0.6
    found = stored_advantages.sampling_probabilities(jnp.array([0.4, 0.0, 0.2]))
    np.testing.assert_allclose(found, [2 / 3, 0, 1 / 3], rtol=1e-6)


def test_probabilities_sum_to_one_whatever_the_scale():
    with jax.enable_x64(True):
        advantage = jax.random.uniform(jax.random.key(0), (9,), jnp.float64)
        found = stored_advantages.sampling_probabilities(advantage)
        np.testing.assert_allclose(found.sum(), 1, rtol=1e-12)
        np.testing.assert_allclose(stored_advantages.sampling_probabilities(advantage * 7), found, rtol=1e-12)


def test_nothing_better_than_expected_is_refused():
    with pytest.raises(ValueError, match="none of 3 stored rows is better than expected"):
        stored_advantages.sampling_probabilities(jnp.zeros(3))
