"""Attention over a cache in blocks is attention over all of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.attention.cached import attend_cached, edges
from jrl.models.attention.reference import attend

COLUMNS = 400  # blocks of 64, 64, 128 and 144


def operands(rows=3, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    return make(rows, 1, 4, 8), make(rows, 2, COLUMNS, 8), make(rows, 2, COLUMNS, 8)


def cut(x):
    starts = (0, *edges(COLUMNS)[:-1])
    return tuple(x[:, :, a:b] for a, b in zip(starts, edges(COLUMNS)))


def up_to(*last):
    return jnp.arange(COLUMNS)[None, None] <= jnp.array(last)[:, None, None]


cached = jax.jit(
    lambda q, k, v, mask, cap=None, sinks=None: attend_cached(q, cut(k), cut(v), None, mask, cap=cap, sinks=sinks)
)


def test_blocks_double():
    assert edges(5) == (5,) and edges(64) == (64,) and edges(65) == (64, 65)
    assert edges(COLUMNS) == (64, 128, 256, 400)


def test_a_mean_by_hand():
    # Queries of 0 score all alike: a row that sees columns 0 to 99 gets their mean, (0 + 99) / 2.
    v = jnp.broadcast_to(jnp.arange(COLUMNS, dtype=jnp.float32)[None, None, :, None], (1, 1, COLUMNS, 2))
    actual = attend_cached(jnp.zeros((1, 1, 1, 2)), cut(v), cut(v), None, up_to(99))
    np.testing.assert_allclose(actual.ravel(), [49.5, 49.5], rtol=1e-6)


@pytest.mark.parametrize("last", [(0, 40, 63), (64, 3, 127), (399, 200, 0)], ids=str)
@pytest.mark.parametrize("cap", [None, 2.0])
def test_it_is_attention(last, cap):
    q, k, v = operands()
    np.testing.assert_allclose(
        cached(q, k, v, up_to(*last), cap), attend(q, k, v, up_to(*last), cap=cap), rtol=0, atol=1e-6
    )
    if cap is None:
        sinks = jnp.array([-1.0, 0.5, 9.0, 3.0])
        expected = attend(q, k, v, up_to(*last), sinks=sinks)
        np.testing.assert_allclose(cached(q, k, v, up_to(*last), None, sinks), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("heads", [4, 2])  # two queries a key head, and one
def test_turned_keys_give_the_same(heads):
    q, k, v = operands()
    q, mask = q[:, :, :heads], up_to(96, 3, 399)
    turn = lambda blocks: tuple(block.swapaxes(-1, -2) for block in blocks)
    stacked = lambda blocks: tuple(jnp.stack([0 * block, block]) for block in blocks)
    expected = attend(q, k, v, mask)
    actual = attend_cached(q, turn(cut(k)), cut(v), None, mask, transposed=True)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
    of_layers = attend_cached(q, stacked(turn(cut(k))), stacked(cut(v)), jnp.int32(1), mask, transposed=True)
    np.testing.assert_allclose(of_layers, expected, rtol=0, atol=1e-6)


def test_a_window_may_leave_the_first_block_unseen():
    q, k, v = operands()
    mask = up_to(300, 150, 20) & (jnp.arange(COLUMNS)[None, None] > jnp.array([290, 100, 10])[:, None, None])
    np.testing.assert_allclose(cached(q, k, v, mask), attend(q, k, v, mask), rtol=0, atol=1e-6)


def test_a_row_does_not_depend_on_how_far_the_others_are():
    q, k, v = operands()
    alone = cached(q, k, v, up_to(50, 50, 50))
    np.testing.assert_array_equal(alone[1], cached(q, k, v, up_to(399, 50, 180))[1])


def test_a_block_that_no_row_sees_is_not_read():
    q, k, v = operands()
    spoiled = [x.at[:, :, 128:].set(jnp.nan) for x in (k, v)]
    np.testing.assert_array_equal(cached(q, *spoiled, up_to(127, 4, 80)), cached(q, k, v, up_to(127, 4, 80)))
    assert np.isnan(cached(q, *spoiled, up_to(128, 4, 80))).any()


def test_a_layer_of_a_stack_and_float64():
    with jax.enable_x64(True):
        q, k, v = operands(dtype=jnp.float64)
        stack = lambda x: tuple(jnp.stack([block * 0, block]) for block in cut(x))
        mask = up_to(399, 200, 0)
        actual = attend_cached(q, stack(k), stack(v), jnp.int32(1), mask)
        assert actual.dtype == jnp.float64
        np.testing.assert_allclose(actual, attend(q, k, v, mask), rtol=0, atol=1e-14)
