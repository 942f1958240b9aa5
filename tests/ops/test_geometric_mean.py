from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import geometric_mean, sequence_ratio

OLD = jnp.array([-1.0, -2.0])
SEGMENT, MASK = jnp.zeros(2, jnp.int32), jnp.ones(2, bool)


def both(difference, advantage, low=0.4, high=0.4):
    fn = jax.jit(
        lambda lp: geometric_mean.gmpo(
            lp, OLD, jnp.full(2, advantage), MASK, SEGMENT, num_segments=1, log_clip_low=low, log_clip_high=high
        )
    )
    new = OLD + jnp.array(difference)
    return fn(new), jax.grad(lambda lp: fn(lp).mean())(new)


def test_gmpo_by_hand():
    # A = 1, d = [0.6, 0], cap 0.4: s = exp((0.4 + 0) / 2) = 1.22140; the capped token has no gradient, the other s / 2
    value, gradient = both([0.6, 0.0], 1.0)
    np.testing.assert_allclose(value, [-1.2214028] * 2, rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, -0.6107014], rtol=1e-6)
    # A = -1, d = [-0.6, 0.6]: the first is held at -0.4, the second is not: s = exp(0.1), l = s
    value, gradient = both([-0.6, 0.6], -1.0)
    np.testing.assert_allclose(value, [1.1051709] * 2, rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, 0.5525855], rtol=1e-6)


def test_each_bound_is_of_its_side():
    # A = 1: only the upper bound, 0.1: exp((0.1 - 0.9) / 2); A = -1: only the lower, 0.3: exp((0.9 - 0.3) / 2)
    np.testing.assert_allclose(both([0.9, -0.9], 1.0, low=0.3, high=0.1)[0], [-np.exp(-0.4)] * 2, rtol=1e-6)
    np.testing.assert_allclose(both([0.9, -0.9], -1.0, low=0.3, high=0.1)[0], [np.exp(0.3)] * 2, rtol=1e-6)


def test_with_bounds_out_of_reach_it_is_gspo_without_its_clip():
    new = OLD + jnp.array([0.7, -0.3])
    arrays = (new, OLD, jnp.full(2, 2.0), MASK, SEGMENT)
    gmpo = geometric_mean.gmpo(*arrays, num_segments=1, log_clip_low=9.0, log_clip_high=9.0)
    gspo = sequence_ratio.gspo(*arrays, num_segments=1, clip_low=0.9, clip_high=99.0)
    np.testing.assert_allclose(gmpo, gspo, rtol=1e-6)
