from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from narrow_inputs import check_widens

from jrl.ops import robust_scale

NAN = float("nan")


def test_percentile_scaling_by_hand():
    # S = 4: 2 / max(1, 4) = 0.5; S = 0.1: 2 / max(1, 0.1) = 2
    run = jax.jit(robust_scale.percentile_scaled)
    np.testing.assert_allclose(run(jnp.array([2.0, -4.0]), 4.0), [0.5, -1])
    np.testing.assert_allclose(run(jnp.array([2.0]), 0.1), [2])
    check_widens(lambda a: robust_scale.percentile_scaled(a, 3.0), jnp.array([1.3, 0.7]))


def test_percentiles_move_by_hand():
    # 0 to 20 in steps of 1: q05 = 1, q95 = 19. Twice as large: 2 and 38
    returns = jnp.concatenate([jnp.arange(21.0), jnp.array([NAN, 1e9])])
    mask = jnp.arange(23) < 21
    run = jax.jit(robust_scale.percentile_range)
    scale, low, high = run(returns, mask, NAN, NAN, decay=0.75)
    np.testing.assert_allclose([scale, low, high], [18, 1, 19], rtol=1e-6)
    # 0.75 * 1 + 0.25 * 2 = 1.25; 0.75 * 19 + 0.25 * 38 = 23.75
    scale, low, high = run(2 * returns, mask, low, high, decay=0.75)
    np.testing.assert_allclose([scale, low, high], [22.5, 1.25, 23.75], rtol=1e-6)
    check_widens(lambda x: robust_scale.percentile_range(x, mask, NAN, NAN, decay=0.75)[0], returns / 7)


def test_fewer_than_twenty_returns_move_nothing():
    run = jax.jit(robust_scale.percentile_range)
    nineteen = jnp.arange(23) < 19
    np.testing.assert_allclose(run(jnp.arange(23.0), nineteen, 1.0, 5.0, decay=0.5), [4, 1, 5])
    np.testing.assert_array_equal(run(jnp.arange(23.0), nineteen, NAN, NAN, decay=0.5), [0, NAN, NAN])
    np.testing.assert_array_equal(run(jnp.full(3, NAN), jnp.zeros(3, bool), NAN, NAN, decay=0.5), [0, NAN, NAN])
    twenty = run(jnp.arange(23.0), jnp.arange(23) < 20, 1.0, 5.0, decay=0.5)
    assert float(twenty[0]) > 4


def test_unimix_by_hand():
    # V = 2, p = 1 and 0: 0.99 * 1 + 0.01 / 2 = 0.995, and 0.005
    got = jax.jit(robust_scale.unimix)(jnp.array([0.0, -jnp.inf]), share=0.01)
    np.testing.assert_allclose(jnp.exp(got), [0.995, 0.005], rtol=1e-5)
    check_widens(lambda lp: robust_scale.unimix(lp, share=0.01), jnp.array([-0.7, -0.7]))


def test_unimix_sums_to_one_and_its_gradient_is_finite():
    with jax.enable_x64(True):
        lp = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (3, 7), jnp.float64) * 5)
        np.testing.assert_allclose(jnp.exp(robust_scale.unimix(lp, share=0.1)).sum(-1), 1, rtol=1e-12)
        # d log((1 - u) p + u / V) / d log p = (1 - u) p / ((1 - u) p + u / V)
        slope = jax.grad(lambda x: robust_scale.unimix(x, share=0.1).sum())(lp)
        p = np.exp(np.asarray(lp))
        np.testing.assert_allclose(slope, 0.9 * p / (0.9 * p + 0.1 / 7), rtol=1e-10)
