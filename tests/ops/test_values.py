"""What a value head learns from: by hand, masked, and its gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops.values import clipped_value_loss, explained_variance

NAN = float("nan")


def loss_of(values, old, returns, mask=True, clip=0.2):
    array = lambda x: jnp.atleast_1d(jnp.asarray(x, jnp.float32))
    mask = jnp.broadcast_to(jnp.asarray(mask), array(values).shape)
    return jax.jit(clipped_value_loss, static_argnames="clip")(
        array(values), array(old), array(returns), mask, clip=clip
    )


def test_the_clipped_loss_by_hand():
    # v = 0.9, v_old = 0.5: Ret = 0: 0.5 * max(0.9^2, 0.7^2) = 0.405; Ret = 1: 0.5 * max(0.1^2, 0.3^2) = 0.045, clipped.
    # v = 0.6: within the clip, 0.5 * 0.4^2 = 0.08. v = 0.1, Ret = 0: moved down too far, 0.5 * 0.3^2 = 0.045.
    loss, binds = loss_of([0.9, 0.9, 0.6, 0.1], [0.5] * 4, [0, 1, 1, 0])
    np.testing.assert_allclose(loss, [0.405, 0.045, 0.08, 0.045], rtol=1e-6)
    np.testing.assert_array_equal(binds, [False, True, False, True])
    loss, binds = loss_of([0.9, 0.9], [0.5] * 2, [0, 1], clip=None)  # 0.5 * 0.9^2, 0.5 * 0.1^2
    np.testing.assert_allclose(loss, [0.405, 0.005], rtol=1e-5)
    assert not binds.any()


def test_a_value_that_has_moved_too_far_has_no_gradient():
    # v - Ret where the clip does not bind: 0.9, 0.6 - 1; 0 where it does. Returns and old values have none at all.
    values, old, returns = jnp.array([0.9, 0.9, 0.6]), jnp.full(3, 0.5), jnp.array([0.0, 1.0, 1.0])
    total = lambda v, o, r: clipped_value_loss(v, o, r, jnp.ones(3, bool), clip=0.2)[0].sum()
    actual = jax.jit(jax.grad(total, (0, 1, 2)))(values, old, returns)
    np.testing.assert_allclose(actual[0], [0.9, 0, -0.4], rtol=1e-6)
    np.testing.assert_array_equal(actual[1:], np.zeros((2, 3)))


def test_the_gradient_is_that_of_differences():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        values, old, returns = jnp.asarray(rng.uniform(-1, 1, (3, 40)))
        of = lambda v: clipped_value_loss(v, old, returns, jnp.ones(40, bool), clip=0.3)[0]
        numeric = (of(values + 1e-6) - of(values - 1e-6)) / 2e-6
        np.testing.assert_allclose(jax.grad(lambda v: of(v).sum())(values), numeric, atol=1e-8)


def test_what_is_masked_matters_neither_to_the_loss_nor_to_the_gradient():
    mask = [True, False]
    loss, binds = loss_of([0.9, NAN], [0.5, NAN], [1, NAN], mask)
    np.testing.assert_allclose(loss, [0.045, 0], rtol=1e-6)
    np.testing.assert_array_equal(binds, [True, False])
    total = lambda v: clipped_value_loss(v, v, jnp.array([1.0, NAN]), jnp.array(mask), clip=0.2)[0].sum()
    np.testing.assert_allclose(jax.grad(total)(jnp.array([0.9, NAN])), [-0.1, 0], rtol=1e-5)


def test_explained_variance_by_hand():
    # Ret - v = [0, 0, 1]: variance 2/9; that of Ret is 2/3: 1 - (2/9) / (2/3 + 1e-5) = 0.66667
    returns, values = jnp.array([0.0, 1, 2, NAN]), jnp.array([0.0, 1, 1, NAN])
    mask = jnp.array([True, True, True, False])
    explained = jax.jit(explained_variance)
    assert float(explained(values, returns, mask)) == pytest.approx(0.66667, abs=1e-5)
    assert float(explained(returns, returns, mask)) == 1
    assert float(explained(jnp.full(4, 7.0), returns, mask)) == pytest.approx(0, abs=2e-5)  # a constant, whatever it is
    assert np.isnan(explained(values, jnp.full(4, 0.5), mask))  # nothing to explain
    assert np.isnan(explained(values, returns, jnp.zeros(4, bool)))
