from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import decoupled, surrogate

ALL = jnp.ones(2, bool)
BOUNDS = {"clip_low": 0.2, "clip_high": 0.2}


def test_decoupled_by_hand():
    # behaviour -1.2, old -1.0, new -0.9, A = 1: -exp(0.2) * min(exp(0.1), 1.2) = -exp(0.3) = -1.349859
    # behaviour -3: the weight exp(2) is cut to 2: -2 * exp(0.1) = -2.210342
    fn = jax.jit(
        lambda lp: decoupled.decoupled_clipped(
            lp, jnp.full(2, -1.0), jnp.array([-1.2, -3.0]), jnp.ones(2), ALL, **BOUNDS, cap=2.0
        )
    )
    new = jnp.full(2, -0.9)
    np.testing.assert_allclose(fn(new), [-1.3498588, -2.2103418], rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda lp: fn(lp).sum())(new), [-1.3498588, -2.2103418], rtol=1e-6)


def test_the_trust_region_is_around_the_old_policy_and_not_the_behaviour():
    # new - old = 0.3: clipped at 1.2, times exp(0.2); plain PPO on behaviour would be 1.2
    arrays = jnp.array([-0.7, -0.7]), jnp.full(2, -1.0), jnp.full(2, -1.2), jnp.ones(2), ALL
    got = decoupled.decoupled_clipped(*arrays, **BOUNDS, cap=9.0)
    np.testing.assert_allclose(got, [-1.2 * np.exp(0.2)] * 2, rtol=1e-6)


def test_on_fresh_samples_it_is_the_clip():
    new, old, advantages = jnp.array([-0.9, -2.0]), jnp.array([-1.0, -1.5]), jnp.array([1.0, -1.0])
    got = decoupled.decoupled_clipped(new, old, old, advantages, ALL, **BOUNDS, cap=2.0)
    np.testing.assert_array_equal(got, surrogate.clipped(new, old, advantages, ALL, **BOUNDS))


def test_interpolated_logprobs_by_hand():
    # drawn by 3, old 4, now 5: alpha = 1/2, between -2 and -1: -1.5. Drawn by 4: alpha 0, its own. By 5: now.
    new, behaviour = jnp.array([-1.0, -1.0, -1.0, jnp.nan]), jnp.array([-2.0, -2.0, -2.0, jnp.nan])
    mask = jnp.array([True, True, True, False])
    versions = jnp.array([3, 4, 5, -1])
    fn = lambda lp: decoupled.interpolated_logprobs(lp, behaviour, mask, versions, old_version=4, version=5)
    np.testing.assert_allclose(jax.jit(fn)(new), [-1.5, -2.0, -1.0, 0], rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(lambda lp: fn(lp).sum())(new), 0)
    # four versions old, of five: alpha = (4 - 0) / (5 - 0) = 0.8
    far = decoupled.interpolated_logprobs(new, behaviour, mask, jnp.zeros(4, jnp.int32), old_version=4, version=5)
    np.testing.assert_allclose(far[:3], [-1.2] * 3, rtol=1e-6)
