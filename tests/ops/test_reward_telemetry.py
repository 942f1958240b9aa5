from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from narrow_inputs import check_widens

from jrl.ops import reward_telemetry

NAN = float("nan")


def test_reward_by_length_by_hand():
    # Four buckets of 8 tokens: 1-2, 3-4, 5-6, 7-8. An empty completion is in the first, a longer one in the last.
    length = jnp.array([1, 2, 3, 8, 9, 0, 7])
    reward = jnp.array([1.0, 0.0, 2.0, 4.0, 0.0, 5.0, NAN])
    valid = jnp.array([True] * 6 + [False])
    run = jax.jit(functools.partial(reward_telemetry.length_bucket_means, num_buckets=4, max_completion=8))
    means, shares = run(reward, length, valid)
    np.testing.assert_allclose(means, [2, 2, 0, 2])  # (1 + 0 + 5) / 3; 2; none; (4 + 0) / 2
    np.testing.assert_allclose(shares, [3 / 6, 1 / 6, 0, 2 / 6], rtol=1e-6)
    # Of at most 5 tokens 1.25, 2.5, 3.75 and 5 end the buckets.
    uneven = functools.partial(reward_telemetry.length_bucket_means, num_buckets=4, max_completion=5)
    shares = jax.jit(uneven)(jnp.ones(5), jnp.arange(1, 6), jnp.ones(5, bool))[1]
    np.testing.assert_allclose(shares, [1 / 5, 1 / 5, 1 / 5, 2 / 5], rtol=1e-6)
    np.testing.assert_array_equal(uneven(jnp.full(1, 7.0), jnp.ones(1, jnp.int32), jnp.ones(1, bool)),
                                  [[7, 0, 0, 0], [1, 0, 0, 0]])  # fmt: skip
    check_widens(lambda r: uneven(r, jnp.ones(3, jnp.int32), jnp.ones(3, bool))[0], jnp.array([0.9, 0.3, 0.1]))
    none = run(reward, length, jnp.zeros(7, bool))
    np.testing.assert_array_equal(none, np.zeros((2, 4)))


def test_bucket_means_weigh_up_to_the_mean():
    length, reward = jnp.arange(1, 12), jax.random.normal(jax.random.key(0), (11,))
    means, shares = reward_telemetry.length_bucket_means(
        reward, length, jnp.ones(11, bool), num_buckets=4, max_completion=11
    )
    np.testing.assert_allclose((means * shares).sum(), reward.mean(), rtol=1e-5)


def test_rows_that_change_places_by_hand():
    # Group 0: rows 0 and 2 change places, and row 4 is still the best. In group 1 a tie arises, which is no change.
    before = jnp.array([1.0, 0.0, 0.0, 1.0, 3.0, NAN])
    after = jnp.array([0.2, 1.0, 0.3, 1.0, 2.0, NAN])
    group, valid = jnp.array([0, 1, 0, 1, 0, 0]), jnp.array([True] * 5 + [False])
    got = jax.jit(reward_telemetry.order_flipped)(before, after, group, valid)
    np.testing.assert_array_equal(got, [True, False, True, False, False, False])


def test_a_shift_and_a_positive_scale_change_no_places_and_a_sign_all():
    before, group = jax.random.normal(jax.random.key(1), (6,)), jnp.array([0, 0, 0, 1, 1, 1])
    flipped = lambda after: reward_telemetry.order_flipped(before, after, group, jnp.ones(6, bool))
    assert not flipped(2 * before - 3).any() and flipped(-before).all()


def test_correlation_by_hand():
    run = jax.jit(reward_telemetry.correlation)
    valid = jnp.array([True, True, True, False])
    opposed = run(jnp.array([1.0, 2.0, 3.0, NAN]), jnp.array([6.0, 4.0, 2.0, 0.0]), valid)
    np.testing.assert_allclose(opposed, -1, rtol=1e-6)
    # Deviations -1, 0, 1 and -1, 2, -1: orthogonal.
    assert abs(float(run(jnp.array([1.0, 2.0, 3.0, 9.0]), jnp.array([0.0, 3.0, 0.0, 9.0]), valid))) < 1e-6
    # The mean of seven times 0.3 misses it by a rounding, which is no spread.
    constant = run(jnp.array([2.0, 2.0, 2.0, 5.0]), jnp.array([1.0, 2.0, 3.0, 9.0]), valid)
    assert float(constant) == 0  # no spread at all, and not 0 / 0
    steady, seven = jnp.full(7, 0.3), jnp.ones(7, bool)
    assert float(run(steady, jnp.arange(7.0), seven)) == float(run(jnp.arange(7.0), steady, seven)) == 0
    check_widens(lambda a, b: reward_telemetry.correlation(a, b, seven), jnp.arange(7.0) / 7, jnp.arange(7.0) ** 2 / 7)
    assert float(run(jnp.arange(4.0), jnp.arange(4.0), jnp.zeros(4, bool))) == 0
