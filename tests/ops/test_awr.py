from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import awr


def test_awr_by_hand():
    # A = 0.5, beta = 0.5: exp(1) = 2.71828; A = 5: min(exp(10), 20) = 20; A = 0: 1; A = -1: exp(-2); logprob -2
    advantages = jnp.array([0.5, 5.0, 0.0, -1.0])
    fn = jax.jit(lambda lp: awr.awr(lp, advantages, jnp.ones(4, bool), beta=0.5, max_weight=20.0))
    weights = np.array([2.7182818, 20, 1, 0.1353353])
    np.testing.assert_allclose(fn(jnp.full(4, -2.0)), 2 * weights, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda lp: fn(lp).sum())(jnp.full(4, -2.0)), -weights, rtol=1e-6)


def test_a_large_advantage_is_the_largest_weight_and_finite():
    got = awr.awr(jnp.array([-1.0]), jnp.array([1e6]), jnp.ones(1, bool), beta=0.01, max_weight=20.0)
    np.testing.assert_allclose(got, [20], rtol=1e-5)


def test_at_a_large_beta_it_is_maximum_likelihood():
    logprobs = jnp.array([-1.0, -2.0])
    got = awr.awr(logprobs, jnp.array([1.0, -1.0]), jnp.ones(2, bool), beta=1e7, max_weight=20.0)
    np.testing.assert_allclose(got, -logprobs, rtol=1e-6)
