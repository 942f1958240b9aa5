from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import covariance

NAN = float("nan")
TWO = jnp.ones(2, bool)


def test_covariance_by_hand():
    # A = [1, -1], mean 0; lp = [-0.1, -2.1], mean -1.1: 1 * 1 and -1 * -1
    got = jax.jit(covariance.covariance)(jnp.array([-0.1, -2.1]), jnp.array([1.0, -1.0]), TWO)
    np.testing.assert_allclose(got, [1, 1], rtol=1e-6)


def test_the_masked_are_in_no_mean_and_nothing_is_differentiated():
    lp, advantages = jnp.array([-0.1, -2.1, NAN]), jnp.array([1.0, -1.0, NAN])
    mask = jnp.array([True, True, False])
    np.testing.assert_allclose(covariance.covariance(lp, advantages, mask), [1, 1, 0], rtol=1e-6)
    gradient = jax.grad(lambda *a: covariance.covariance(*a, mask).sum(), argnums=(0, 1))(lp, advantages)
    np.testing.assert_array_equal(gradient, 0)


def test_equal_advantages_have_no_covariance_to_the_last_bit():
    # the mean of three times 0.1 is not 0.1 in float32
    lp = jnp.array([-1.0, -2.0, -4.0])
    np.testing.assert_array_equal(covariance.covariance(lp, jnp.full(3, 0.1), jnp.ones(3, bool)), 0)
    np.testing.assert_array_equal(covariance.kl_cov(lp, jnp.full(3, 0.1), jnp.ones(3, bool), share=0.5), False)
    np.testing.assert_array_equal(covariance.kl_cov(jnp.full(3, -0.1), lp, jnp.ones(3, bool), share=0.5), False)


# Ten tokens: advantages +-1 in turn, log-probs such that cov is 2, 2, 1, 1, 0, 0, -1, -1, -2, -2
ADVANTAGES = jnp.array([1.0, -1.0] * 5)
LOGPROBS = jnp.array([2.0, -2.0, 1.0, -1.0, 0.0, 0.0, -1.0, 1.0, -2.0, 2.0]) - 3
TEN = jnp.ones(10, bool)


def chosen(x):
    return np.flatnonzero(x).tolist()


def test_kl_cov_by_hand():
    # a share of 0.2 of 10 tokens: the two with cov 2; of 0.25: floor(2.5) = 2 too; of 0.09: none
    fn = jax.jit(lambda share: covariance.kl_cov(LOGPROBS, ADVANTAGES, TEN, share=share))
    assert chosen(fn(0.2)) == [0, 1]
    assert chosen(fn(0.25)) == [0, 1]
    assert chosen(fn(0.09)) == []
    assert chosen(fn(0.1)) == [0, 1]  # they tie


def test_clip_cov_by_hand():
    # between 0.5 and 1.5: tokens 2 and 3; a share of 0.1 is one token, that with more noise
    noise = jnp.array([9, 9, 1, 2, 9, 9, 9, 9, 9, 9], jnp.uint32)
    fn = jax.jit(
        lambda noise, share: covariance.clip_cov(LOGPROBS, ADVANTAGES, TEN, noise, share=share, low=0.5, high=1.5)
    )
    assert chosen(fn(noise, 0.1)) == [3]
    assert chosen(fn(noise.at[2].set(5), 0.1)) == [2]
    assert chosen(fn(noise, 0.9)) == [2, 3]
    assert chosen(fn(noise, 0.05)) == []


def test_the_limits_of_clip_cov_are_open():
    noise = jnp.arange(10, dtype=jnp.uint32)
    assert chosen(covariance.clip_cov(LOGPROBS, ADVANTAGES, TEN, noise, share=1.0, low=1.0, high=2.0)) == []


def test_the_penalty_by_hand():
    # d = [0.2, -0.2, 0.2], A = 1, the first two selected, coefficient 0.5:
    # -exp(0.2) + 0.1 = -1.121403; -exp(-0.2) + 0.1 = -0.718731; -exp(0.2); gradients -rho +- 0.5
    old, selected = jnp.full(3, -1.0), jnp.array([True, True, False])
    new = old + jnp.array([0.2, -0.2, 0.2])
    fn = jax.jit(lambda lp: covariance.kl_cov_loss(lp, old, jnp.ones(3), selected, jnp.ones(3, bool), coefficient=0.5))
    np.testing.assert_allclose(fn(new), [-1.1214028, -0.7187308, -1.2214028], rtol=1e-6)
    gradient = jax.grad(lambda lp: fn(lp).sum())(new)
    np.testing.assert_allclose(gradient, [-0.7214028, -1.3187308, -1.2214028], rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(lambda lp: fn(lp).sum())(old), -1)  # at 0 the penalty has no gradient
