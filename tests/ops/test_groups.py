from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import groups

NAN = float("nan")

# Group 0: rewards 1, 3 (and a row that is not valid); group 1: one valid row; group 2: none.
X = jnp.array([1.0, 5.0, 3.0, NAN, NAN])
GROUP = jnp.array([0, 1, 0, 0, 2], jnp.int32)
VALID = jnp.array([True, True, True, False, False])


def test_statistics_by_hand():
    of = lambda fn: jax.jit(fn, static_argnames="num_groups")(X, GROUP, VALID, num_groups=3)
    np.testing.assert_array_equal(of(groups.total), [4, 5, 0])
    np.testing.assert_array_equal(of(groups.mean), [2, 5, 0])
    np.testing.assert_array_equal(of(groups.maximum), [3, 5, -np.inf])
    np.testing.assert_array_equal(of(groups.minimum), [1, 5, np.inf])
    np.testing.assert_array_equal(of(groups.varied), [True, False, False])
    np.testing.assert_array_equal(groups.count(GROUP, VALID, num_groups=3), [2, 1, 0])


def test_values_return_to_their_rows():
    np.testing.assert_array_equal(groups.to_rows(jnp.array([10.0, 20.0, NAN]), GROUP[:4]), [10, 20, 10, 10])
    np.testing.assert_array_equal(groups.to_rows(jnp.array([True, False, True]), GROUP), [1, 0, 1, 1, 1])


def test_rows_may_lie_in_any_order():
    order = jnp.array([4, 2, 0, 3, 1])
    for fn in (groups.total, groups.mean, groups.maximum, groups.minimum, groups.varied):
        straight = fn(X, GROUP, VALID, num_groups=3)
        np.testing.assert_array_equal(fn(X[order], GROUP[order], VALID[order], num_groups=3), straight)


def test_one_group_equals_the_plain_mean():
    x = jax.random.normal(jax.random.key(0), (9,))
    ones = jnp.ones(9, bool)
    np.testing.assert_allclose(groups.mean(x, jnp.zeros(9, jnp.int32), ones, num_groups=1)[0], x.mean(), rtol=1e-6)


def test_a_difference_of_one_rounding_is_a_difference():
    x = jnp.array([1.0, np.nextafter(np.float32(1), np.float32(2))])
    assert groups.varied(x, jnp.zeros(2, jnp.int32), jnp.ones(2, bool), num_groups=1)[0]


def test_gradient_of_the_mean_is_one_over_the_count_and_nan_stays_out():
    gradient = jax.grad(lambda x: groups.mean(x, GROUP, VALID, num_groups=3).sum())(X)
    np.testing.assert_allclose(gradient, [0.5, 1, 0.5, 0, 0], rtol=1e-6)
