from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.test_util import check_grads

from jrl.ops import entropy


def of(logits):
    logprobs = jax.nn.log_softmax(logits)
    return -(jnp.exp(logprobs) * logprobs).sum(-1)


def test_bonus_by_hand():
    # uniform over 4: log 4 = 1.386294; -0.01 * 1.386294 = -0.013863
    bonus = jax.jit(entropy.entropy_bonus)(of(jnp.zeros((1, 4))), jnp.ones(1, bool), coefficient=0.01)
    np.testing.assert_allclose(bonus, [-0.0138629], rtol=1e-5)


def test_a_coefficient_of_minus_one_is_the_entropy():
    value = of(jax.random.normal(jax.random.key(0), (3, 5)))
    np.testing.assert_array_equal(entropy.entropy_bonus(value, jnp.ones(3, bool), coefficient=-1.0), value)


def test_gradient_matches_finite_differences_and_rises_entropy():
    with jax.enable_x64(True):
        logits = jax.random.normal(jax.random.key(1), (2, 5), jnp.float64)
        loss = lambda z: entropy.entropy_bonus(of(z), jnp.ones(2, bool), coefficient=0.3)
        check_grads(loss, (logits,), order=1, modes=["rev"], atol=1e-7, rtol=1e-7)
        downhill = logits - jax.grad(lambda z: loss(z).sum())(logits)
        assert of(downhill).sum() > of(logits).sum()


def test_masked_tokens_give_no_bonus_and_no_gradient():
    value, mask = jnp.array([1.0, float("nan")]), jnp.array([True, False])
    np.testing.assert_array_equal(entropy.entropy_bonus(value, mask, coefficient=0.5), [-0.5, 0])
    gradient = jax.grad(lambda h: entropy.entropy_bonus(h, mask, coefficient=0.5).sum())(value)
    np.testing.assert_array_equal(gradient, [-0.5, 0])
