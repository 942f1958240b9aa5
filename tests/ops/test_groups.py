from __future__ import annotations

import functools

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


def test_rows_equal_to_the_chosen_row_of_their_group():
    # Group 0: rows 0, 2 and 3 of which 2 is chosen, and 0 equals it; row 1 does too, in another group without a choice.
    x = jnp.array([[7, -1], [7, -1], [7, -1], [7, 0], [0, 0]], jnp.int32)
    chosen = jnp.array([False, False, True, False, True])
    same_as = jax.jit(functools.partial(groups.same_as, num_groups=4))
    np.testing.assert_array_equal(same_as(x, chosen, GROUP), [1, 0, 1, 0, 1])
    np.testing.assert_array_equal(same_as(x, jnp.zeros(5, bool), GROUP), [0, 0, 0, 0, 0])
    large = jnp.array([[2**31 - 1], [2**31 - 2]], jnp.int32)  # no float32 tells these apart
    np.testing.assert_array_equal(same_as(large, chosen[1:3], jnp.zeros(2, jnp.int32)), [0, 1])
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        rows = [jax.device_put(a[:4], jax.NamedSharding(mesh, jax.P("data"))) for a in (x, chosen, GROUP)]
        np.testing.assert_array_equal(same_as(*rows), [1, 0, 1, 0])


def test_to_compare_rows_takes_no_memory_of_rows_times_groups_times_tokens():
    rows, num_groups, tokens = 64, 16, 256
    arrays = [jax.ShapeDtypeStruct(s, d) for s, d in (((rows, tokens), "int32"), ((rows,), bool), ((rows,), "int32"))]
    compiled = jax.jit(functools.partial(groups.same_as, num_groups=num_groups)).lower(*arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < rows * num_groups * tokens  # one byte each


def test_one_group_equals_the_plain_mean():
    x = jax.random.normal(jax.random.key(0), (9,))
    ones = jnp.ones(9, bool)
    np.testing.assert_allclose(groups.mean(x, jnp.zeros(9, jnp.int32), ones, num_groups=1)[0], x.mean(), rtol=1e-6)


def test_a_difference_of_one_rounding_is_a_difference():
    x = jnp.array([1.0, np.nextafter(np.float32(1), np.float32(2))])
    assert groups.varied(x, jnp.zeros(2, jnp.int32), jnp.ones(2, bool), num_groups=1)[0]


def test_nan_in_a_valid_row_is_no_equal_value():
    # Group 0 has it in a valid row, group 1 in another one; group 2 has no row.
    x, group, valid = jnp.array([1.0, NAN, 1.0, NAN]), jnp.array([0, 0, 1, 1]), jnp.array([True, True, True, False])
    np.testing.assert_array_equal(groups.varied(x, group, valid, num_groups=3), [True, False, False])


def test_gradient_of_the_mean_is_one_over_the_count_and_nan_stays_out():
    gradient = jax.grad(lambda x: groups.mean(x, GROUP, VALID, num_groups=3).sum())(X)
    np.testing.assert_allclose(gradient, [0.5, 1, 0.5, 0, 0], rtol=1e-6)
