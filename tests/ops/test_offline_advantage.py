from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import offline_advantage

NEW = jnp.array([-2.0, -4.0])
REFERENCE = NEW - jnp.array([0.7, -0.2])  # LP - LP_ref = 0.5, LP = -6
MASK, SEGMENT = jnp.ones(2, bool), jnp.zeros(2, jnp.int32)


def both(fn, *arrays, **options):
    loss = jax.jit(lambda lp: fn(lp, *arrays, MASK, **options).sum())
    return loss(NEW), jax.grad(loss)(NEW)


def test_a_lol_by_hand():
    # a = 0.4: ratio min(exp(0.5), 1.9) = 1.64872; -0.4 * 1.64872 * -6 = 3.95693; gradient -0.4 * 1.64872 a token
    options = {"segment": SEGMENT, "num_segments": 1, "clip": 0.9}
    value, gradient = both(offline_advantage.a_lol, REFERENCE, jnp.full(2, 0.4), **options)
    np.testing.assert_allclose(value, 3.9569310, rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.6594885] * 2, rtol=1e-6)
    # clip 0.5: exp(0.5) is cut to 1.5; two nats below: exp(-2) is raised to 0.5
    value, _ = both(offline_advantage.a_lol, REFERENCE, jnp.full(2, 0.4), **options | {"clip": 0.5})
    np.testing.assert_allclose(value, 0.4 * 1.5 * 6, rtol=1e-6)
    value, _ = both(offline_advantage.a_lol, NEW + 1, jnp.full(2, 0.4), **options | {"clip": 0.5})
    np.testing.assert_allclose(value, 0.4 * 0.5 * 6, rtol=1e-6)


def test_the_token_form_by_hand():
    # ratios exp(0.7) cut to 1.9, and exp(-0.2): 0.4 * (1.9 * 2 + 0.818731 * 4) = 2.829969
    value, gradient = both(offline_advantage.a_lol_token, REFERENCE, jnp.full(2, 0.4), clip=0.9)
    np.testing.assert_allclose(value, 2.8299692, rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.76, -0.3274923], rtol=1e-6)


def test_the_reference_free_form_by_hand():
    value, gradient = both(offline_advantage.a_lol_ref_free, jnp.full(2, 0.4))
    np.testing.assert_allclose(value, 2.4, rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.4] * 2, rtol=1e-6)


def test_the_kl_form_by_hand():
    # 0.4 * 6 + 0.1 * 0.5 = 2.45; gradient -0.4 + 0.1
    value, gradient = both(offline_advantage.a_lol_kl, REFERENCE, jnp.full(2, 0.4), coefficient=0.1)
    np.testing.assert_allclose(value, 2.45, rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.3] * 2, rtol=1e-6)


def test_r_gold_by_hand():
    # p = exp(-2) = 0.135335 and exp(-4) = 0.018316, raised to 0.1: 0.4 * (0.135335 * 2 + 0.1 * 4) = 0.268268
    value, gradient = both(offline_advantage.r_gold, jnp.full(2, 0.4), floor=0.1)
    np.testing.assert_allclose(value, 0.2682682, rtol=1e-5)
    np.testing.assert_allclose(gradient, [-0.0541341, -0.04], rtol=1e-5)


def test_a_row_that_did_no_better_than_expected_is_not_learned_from():
    for fn in (offline_advantage.a_lol_ref_free, lambda *a: offline_advantage.r_gold(*a, floor=0.1)):
        value, gradient = both(fn, jnp.array([-0.4, 0.0]))
        assert value == 0
        np.testing.assert_array_equal(gradient, 0)
