"""The running deviation of rewards, by hand and against all numbers at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import running_scale

NAN = float("nan")


def moments_of(*batches):
    add = jax.jit(running_scale.add_to_moments)
    moments = running_scale.no_moments()
    for x, mask in batches:
        moments = add(moments, jnp.array(x, jnp.float32), jnp.array(mask))
    return moments


def test_the_scale_by_hand():
    # [1, 3]: mean 2, std1 1.41421: 1 / 1.41421 = 0.70711, 3 / 1.41421 = 2.12132. With 5: std1([1, 3, 5]) = 2.
    first = moments_of(([1.0, NAN, 3.0], [True, False, True]))
    np.testing.assert_allclose(first, [2, 2, 2], rtol=1e-6)
    scale = jax.jit(running_scale.scale_by_moments)
    np.testing.assert_allclose(scale(jnp.array([1.0, 3.0]), first), [0.70711, 2.12132], rtol=1e-5)
    second = moments_of(([1.0, 3.0], [True, True]), ([5.0], [True]))
    np.testing.assert_allclose(second, [3, 3, 8], rtol=1e-6)
    np.testing.assert_allclose(scale(jnp.array([1.0, -5.0]), second), [0.5, -2.5], rtol=1e-6)
    np.testing.assert_array_equal(moments_of(([5.0], [True])), [1, 5, 0])


def test_batches_have_the_moments_of_all_numbers_at_once():
    rng = np.random.default_rng(0)
    sizes = (3, 0, 7, 1, 20)
    batches = [(1e3 + rng.normal(size=8 if n < 8 else n), np.arange(8 if n < 8 else n) < n) for n in sizes]
    every = np.concatenate([x.astype(np.float32)[mask] for x, mask in batches]).astype(np.float64)
    found = moments_of(*batches)
    np.testing.assert_allclose(found.count, len(every))
    np.testing.assert_allclose(found.mean, every.mean(), rtol=1e-6)
    np.testing.assert_allclose(found.squares / (found.count - 1), every.var(ddof=1), rtol=1e-3)  # float32 at 1000


def test_one_number_or_equal_ones_scale_nothing_and_there_is_no_gradient():
    for batches in ([], [([7.0], [True])], [([7.0, 7.0], [True, True])]):
        np.testing.assert_array_equal(running_scale.scale_by_moments(jnp.array([3.0]), moments_of(*batches)), [3])
    known = moments_of(([1.0, 3.0], [True, True]))
    assert jax.grad(lambda x: running_scale.scale_by_moments(x, known))(2.0) == 0


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1000.1])
@pytest.mark.parametrize("rows", [3, 7, 13, 48])
def test_the_rounding_of_a_mean_is_no_deviation(value, rows):
    # In float32, 7 times 0.7 has the mean 0.70000005: each number is 6e-8 away from it, and 0.7 / 6e-8 is 1e7.
    batches = [(np.full(rows, value), np.ones(rows, bool)), (np.full(3, value), np.ones(3, bool))]
    moments = moments_of(*batches)
    assert moments.squares == 0 and moments.mean == np.float32(value)
    np.testing.assert_array_equal(running_scale.scale_by_moments(jnp.float32(value), moments), np.float32(value))


def test_bfloat16_is_widened():
    found = running_scale.scale_by_moments(jnp.ones(2, jnp.bfloat16), moments_of(([1.0, 3.0], [True, True])))
    assert found.dtype == jnp.float32
    # mean (256 + 0.5) / 2 = 128.25; bfloat16 would round the distance 255.5 to 256
    numbers = jnp.array([256.0, 0.5], jnp.bfloat16)
    moments = running_scale.add_to_moments(running_scale.no_moments(), numbers, jnp.ones(2, bool))
    assert moments.mean == 128.25 and moments.mean.dtype == jnp.float32
