from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import order_statistics

NAN = float("nan")


def pick(x, count, mask=None):
    mask = jnp.ones(len(x), bool) if mask is None else jnp.array(mask)
    x = jnp.asarray(x, jnp.float32)
    fn = jax.jit(lambda x, mask: order_statistics.largest(order_statistics.order_keys(x), mask, count))
    return np.flatnonzero(fn(x, mask)).tolist()


@pytest.mark.parametrize(
    "count, expected", [(0, []), (1, [2]), (2, [0, 2]), (3, [0, 2, 3]), (5, [0, 1, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_the_largest_by_hand(count, expected):
    assert pick([0.5, -2.0, 3.0, -0.0], count) == expected


def test_ties_with_the_last_are_all_in():
    assert pick([1.0, 2.0, 1.0, 0.0], 2) == [0, 1, 2]
    assert pick([0.0, -0.0, -1.0], 1) == [0, 1]


def test_the_masked_are_not_ranked():
    assert pick([9.0, 1.0, 2.0], 1, mask=[False, True, True]) == [2]
    assert pick([1.0, 2.0], 1, mask=[False, False]) == []


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_keys_have_the_order_of_their_floats(dtype):
    with jax.enable_x64(True):
        x = np.array([-np.inf, -1e30, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.0000001, 1e30, np.inf], dtype)
        keys = np.asarray(order_statistics.order_keys(jnp.asarray(x)))
        assert keys.itemsize == x.itemsize
        tiny = [3, 6] if dtype == np.float32 else []  # flushed to 0 by some devices
        order = [i for i in range(len(x)) if i not in tiny]
        assert keys[4] == keys[5]
        assert np.all(np.diff(keys[order].astype(object)) >= 0)
        assert len(set(keys[order].tolist())) == len(order) - 1


def test_it_equals_a_sort():
    rng = np.random.default_rng(0)
    for count in range(1, 20):
        x = rng.normal(size=20)
        assert pick(x, count) == sorted(np.argsort(-x)[:count].tolist())


def test_the_largest_key_is_where_a_condition_ends():
    keys = jnp.array([1234567, 9], jnp.uint32)
    assert order_statistics.largest_key(lambda k, keys: k <= keys[0], keys) == 1234567
    assert order_statistics.largest_key(lambda k, keys: k > k, keys) == 0
    assert order_statistics.largest_key(lambda k, keys, given: k <= given, keys, jnp.uint32(77)) == 77
    assert int(order_statistics.largest_key(lambda k, keys: k == k, keys)) == 2**32 - 1


def test_a_share_is_rounded_down_but_not_by_its_own_rounding():
    share = lambda n, p: float(order_statistics.share_of(jnp.ones(n, bool), p))
    assert [share(5000, 0.0002), share(4999, 0.0002), share(10, 0.3), share(10, 0.1), share(0, 0.5)] == [1, 0, 3, 1, 0]


def test_rows_may_be_sharded():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 5)), jnp.float32)
    fn = jax.jit(lambda x: order_statistics.largest(order_statistics.order_keys(x), jnp.ones_like(x, bool), 3))
    alone = fn(x)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(fn(jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))), alone)
