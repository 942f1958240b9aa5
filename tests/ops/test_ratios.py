from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import ratios

NAN = float("nan")


def test_log_ratio_is_the_difference_and_zero_where_masked():
    mask = jnp.array([True, False, False, True])
    got = ratios.log_ratio(jnp.array([-1.0, NAN, -1.0, -2.0]), jnp.array([-1.5, -1.0, NAN, -1.5]), mask)
    np.testing.assert_array_equal(got, [0.5, 0, 0, -0.5])


def test_ratio_by_hand():
    # exp(-1 + 1.5) = exp(0.5) = 1.648721; masked: exp(0) = 1
    mask = jnp.array([True, False])
    got = jax.jit(ratios.ratio)(jnp.array([-1.0, NAN]), jnp.array([-1.5, NAN]), mask)
    np.testing.assert_allclose(got, [1.6487213, 1.0], rtol=1e-6)


def test_ratio_of_equal_logprobs_is_exactly_one():
    logprobs = -jnp.abs(jax.random.normal(jax.random.key(0), (20,))) * 5
    assert jnp.all(ratios.ratio(logprobs, logprobs, jnp.ones(20, bool)) == 1)


def test_log_ratios_are_clamped_to_20_and_counted():
    value = jnp.array([-25.0, -20.0, 3.0, 20.0, 20.5])
    np.testing.assert_array_equal(ratios.clamp(value), [-20, -20, 3, 20, 20])
    np.testing.assert_array_equal(ratios.clamped(value), [True, False, False, False, True])


def test_gradient_stops_where_clamped_and_is_whole_on_the_bound():
    gradient = jax.vmap(jax.grad(ratios.clamp))(jnp.array([-25.0, -20.0, 3.0, 20.0, 20.5]))
    np.testing.assert_array_equal(gradient, [0, 1, 1, 1, 0])


def test_gradient_of_the_ratio_is_the_ratio_and_old_logprobs_have_none():
    new, old = jnp.array([-1.0, -2.0, NAN]), jnp.array([-1.5, -1.0, NAN])
    mask = jnp.array([True, True, False])
    by_new, by_old = jax.grad(lambda n, o: ratios.ratio(n, o, mask).sum(), argnums=(0, 1))(new, old)
    np.testing.assert_allclose(by_new, [np.exp(0.5), np.exp(-1.0), 0], rtol=1e-6)
    np.testing.assert_array_equal(by_old, [0, 0, 0])


def test_bfloat16_logprobs_are_subtracted_in_float32():
    got = ratios.ratio(jnp.array([-1.0], jnp.bfloat16), jnp.array([-1.5], jnp.bfloat16), jnp.ones(1, bool))
    assert got.dtype == jnp.float32
