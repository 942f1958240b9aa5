from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import sequence_ratio

OLD = jnp.array([-1.0, -2.0, -0.5])
NEW = OLD + jnp.array([0.2, 0.0, 0.1])
MASK, SEGMENT = jnp.ones(3, bool), jnp.zeros(3, jnp.int32)
BOUNDS = {"num_segments": 1, "clip_low": 3e-4, "clip_high": 4e-4}
WIDE = {"num_segments": 1, "clip_low": 0.2, "clip_high": 0.2}

GSPO = functools.partial(sequence_ratio.gspo, **BOUNDS)
TOKEN = functools.partial(sequence_ratio.gspo_token, **BOUNDS)
PRODUCT = functools.partial(sequence_ratio.sequence_clipped, **WIDE)


def both(loss, advantages, new=NEW, old=OLD):
    """Returns the loss of each token, and the gradient of their mean (G2 of one sequence), under jit."""
    fn = jax.jit(lambda lp: loss(lp, old, jnp.asarray(advantages, jnp.float32), MASK, SEGMENT))
    return fn(new), jax.grad(lambda lp: fn(lp).mean())(new)


@pytest.mark.parametrize("loss", [GSPO, TOKEN])
def test_gspo_by_hand(loss):
    # s = exp((0.2 + 0 + 0.1) / 3) = exp(0.1) = 1.10517. A = 1: -min(1.10517, 1.0004) = -1.0004, no gradient
    value, gradient = both(loss, [1, 1, 1])
    np.testing.assert_allclose(value, [-1.0004] * 3, rtol=1e-6)
    np.testing.assert_array_equal(gradient, 0)
    # A = -1: max(1.10517, 1.0004) = 1.10517; gradient exp(0.1) / 3 = 0.36839 for each token
    value, gradient = both(loss, [-1, -1, -1])
    np.testing.assert_allclose(value, [1.1051709] * 3, rtol=1e-6)
    np.testing.assert_allclose(gradient, [0.3683903] * 3, rtol=1e-6)


@pytest.mark.parametrize("loss", [GSPO, TOKEN])
def test_the_lower_bound_is_its_own(loss):
    # s = exp(-0.1) = 0.904837. A = -1: max(0.9048, 1 - 3e-4) = 0.9997, no gradient; A = 1: -0.904837, its gradient / 3
    value, gradient = both(loss, [-1, -1, -1], new=OLD - 0.1)
    np.testing.assert_allclose(value, [0.9997] * 3, rtol=1e-6)
    np.testing.assert_array_equal(gradient, 0)
    value, gradient = both(loss, [1, 1, 1], new=OLD - 0.1)
    np.testing.assert_allclose(value, [-0.9048374] * 3, rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.9048374 / 3] * 3, rtol=1e-6)


def test_a_token_without_an_advantage_has_no_gradient_of_gspo_token_and_one_of_gspo():
    # s = exp(-0.1), which A >= 0 leaves alone. L6: -A_t * s / 3; L5: every token has (A_1 + A_2 + A_3) / 9 of s
    s = 0.9048374
    _, gradient = both(TOKEN, [1, 1, 0], new=OLD - 0.1)
    np.testing.assert_allclose(gradient, [-s / 3, -s / 3, 0], rtol=1e-6)
    _, gradient = both(GSPO, [1, 1, 0], new=OLD - 0.1)
    np.testing.assert_allclose(gradient, [-2 * s / 9] * 3, rtol=1e-6)


def test_sequence_product_by_hand():
    # the differences sum to 0.3: rho = exp(0.3) = 1.34986. A = 1: -min(1.34986, 1.2) = -1.2
    value, gradient = both(PRODUCT, [1, 1, 1])
    np.testing.assert_allclose(value, [-1.2] * 3, rtol=1e-6)
    np.testing.assert_array_equal(gradient, 0)
    # A = -1: 1.34986, and each token's gradient is all of it
    value, gradient = both(PRODUCT, [-1, -1, -1])
    np.testing.assert_allclose(value, [1.3498588] * 3, rtol=1e-6)
    np.testing.assert_allclose(gradient, [1.3498588] * 3, rtol=1e-6)


def test_masked_tokens_are_in_no_mean():
    # of [0.2, masked, 0.1]: exp(0.15); a denominator of 3 would give exp(0.1)
    mask = jnp.array([True, False, True])
    s = sequence_ratio.mean_ratio(NEW, OLD, mask, SEGMENT, num_segments=1)
    np.testing.assert_allclose(s, [np.exp(0.15)] * 3, rtol=1e-6)


def test_a_sum_beyond_20_nats_is_clamped_and_has_no_gradient():
    value, gradient = both(PRODUCT, [-1, -1, -1], new=OLD + 10)
    np.testing.assert_allclose(value, [np.exp(20.0)] * 3, rtol=1e-5)
    np.testing.assert_array_equal(gradient, 0)


def test_of_one_token_all_are_the_clip_of_its_ratio():
    new, old = jnp.array([-1.0, -2.0]), jnp.array([-1.3, -1.9])
    arrays = (new, old, jnp.array([-1.0, -1.0]), jnp.ones(2, bool), jnp.arange(2))
    # A = -1: max(exp(0.3), 1.2) = 1.34986; max(exp(-0.1), 0.8) = 0.904837
    for fn in (sequence_ratio.gspo, sequence_ratio.gspo_token, sequence_ratio.sequence_clipped):
        got = fn(*arrays, num_segments=2, clip_low=0.2, clip_high=0.2)
        np.testing.assert_allclose(got, [1.3498588, 0.9048374], rtol=1e-6)
