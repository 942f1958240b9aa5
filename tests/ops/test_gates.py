from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import gates


def both(rho, advantages, positive=1.0, negative=1.05):
    old = jnp.full(len(rho), -2.0)
    temperatures = {"positive_temperature": positive, "negative_temperature": negative}
    fn = jax.jit(lambda lp: gates.soft_gated(lp, old, jnp.array(advantages), jnp.ones(len(rho), bool), **temperatures))
    new = old + jnp.log(jnp.array(rho))
    return fn(new), jax.grad(lambda lp: fn(lp).sum())(new)


def test_the_gate_by_hand():
    # rho = 1, tau = 1: f = 4 * 0.5 = 2, f' = 1. rho = 2: f = 4 * sigmoid(1) = 2.924234, f' = 0.786448, by lp rho f'
    value, gradient = both([1.0, 2.0], [1.0, 1.0])
    np.testing.assert_allclose(value, [-2, -2.9242343], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-1, -2 * 0.7864477], rtol=1e-6)


def test_the_temperature_is_of_the_advantages_sign():
    # A = -1, tau 2 at rho 2: f = 2 * sigmoid(2) = 1.761594, f' = 4 * 0.880797 * 0.119203 = 0.419974
    value, gradient = both([2.0, 2.0], [-1.0, 1.0], positive=1.0, negative=2.0)
    np.testing.assert_allclose(value, [1.7615942, -2.9242343], rtol=1e-6)
    np.testing.assert_allclose(gradient, [2 * 0.4199743, -2 * 0.7864477], rtol=1e-5)


@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
def test_on_its_own_samples_every_temperature_has_the_policy_gradient(tau):
    _, gradient = both([1.0, 1.0], [0.7, -1.3], positive=tau, negative=tau)
    np.testing.assert_allclose(gradient, [-0.7, 1.3], rtol=1e-6)


def test_the_gate_closes_on_both_sides():
    _, near = both([1.0, 1.0], [1.0, -1.0])
    _, far = both([12.0, 12.0], [1.0, -1.0])
    assert jnp.all(jnp.abs(far) < 0.01 * jnp.abs(near))
