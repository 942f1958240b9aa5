from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import mirror_descent

NEW, OLD = jnp.array([-4.0, -6.0]), jnp.array([-4.5, -5.7])
MASK, SEGMENT = jnp.ones(2, bool), jnp.zeros(2, jnp.int32)


def both(fn, advantage, tau):
    loss = jax.jit(lambda lp: fn(lp, OLD, jnp.full(2, advantage, jnp.float32), MASK, SEGMENT, num_segments=1, tau=tau))
    return loss(NEW), jax.grad(lambda lp: loss(lp).mean())(NEW)


def test_mirror_descent_by_hand():
    # A = 0.5, LP = -10, LP_old = -10.2, tau = 0.1: 0.5 * 10 + 0.05 * 0.2^2 = 5.002; gradient -0.5 + 0.1 * 0.2 = -0.48
    value, gradient = both(mirror_descent.mirror_descent, 0.5, 0.1)
    np.testing.assert_allclose(value, [5.002] * 2, rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.48] * 2, rtol=1e-5)


def test_the_mean_form_by_hand():
    # LP = -5, LP_old = -5.1, tau = 2: 2.5 + 0.1^2 = 2.51; gradient (-0.5 + 2 * 0.1) / 2 = -0.15 a token
    value, gradient = both(mirror_descent.mean_mirror_descent, 0.5, 2.0)
    np.testing.assert_allclose(value, [2.51] * 2, rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.15] * 2, rtol=1e-5)


def test_without_an_advantage_it_pulls_back_to_the_old_policy():
    # gradient tau * (LP - LP_old) = 0.1 * 0.2
    value, gradient = both(mirror_descent.mirror_descent, 0.0, 0.1)
    np.testing.assert_allclose(value, [0.002] * 2, rtol=1e-4)
    np.testing.assert_allclose(gradient, [0.02] * 2, rtol=1e-5)


def test_with_no_pull_it_is_the_policy_gradient_of_the_sum():
    value, gradient = both(mirror_descent.mirror_descent, 0.5, 0.0)
    np.testing.assert_allclose(value, [5] * 2, rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.5] * 2, rtol=1e-6)
