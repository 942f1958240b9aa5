from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.test_util import check_grads

from jrl.ops import two_hot

NAN = float("nan")
BINS = jnp.array([-1.0, 0.0, 1.0])


def test_symlog_and_symexp_by_hand():
    # symlog(e - 1) = log(e) = 1; symexp(1) = e - 1; both are odd, and inverse to each other
    np.testing.assert_allclose(two_hot.symlog(jnp.array([np.e - 1, 1 - np.e, 0])), [1, -1, 0], rtol=1e-6)
    np.testing.assert_allclose(two_hot.symexp(jnp.array([1.0, -1.0, 0.0])), [np.e - 1, 1 - np.e, 0], rtol=1e-6)
    x = jnp.array([-1000.0, -0.3, 1e-4, 5.0])
    np.testing.assert_allclose(two_hot.symexp(two_hot.symlog(x)), x, rtol=1e-5)


def test_two_hot_by_hand():
    # x = 0.25 between 0 and 1: [0, 0.75, 0.25]; on a bin: all on it; beyond the ends: the end
    got = jax.jit(two_hot.two_hot)(jnp.array([0.25, 0.0, -1.0, 1.0, 7.0, -7.0, -0.5]), BINS)
    expected = [[0, 0.75, 0.25], [0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 0, 1], [1, 0, 0], [0.5, 0.5, 0]]
    np.testing.assert_allclose(got, expected, atol=1e-7)


def test_the_weights_sum_to_1_and_average_to_their_value_on_uneven_bins():
    bins = jnp.array([-3.0, -1.0, -0.5, 2.0, 9.0])
    x = jnp.linspace(-3, 9, 41)
    weights = two_hot.two_hot(x, bins)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(weights @ bins, x, atol=1e-5)
    assert jnp.all((weights > 0).sum(-1) <= 2)


def test_the_loss_by_hand():
    # target weights [0, 0.75, 0.25] of a return symexp(0.25), log-probs [-2, -0.5, -1.2] up to a constant:
    # 0.75 * 0.5 + 0.25 * 1.2 = 0.675, plus their log-sum-exp log(0.135335 + 0.606531 + 0.301194) = 0.042166
    logits, returns = jnp.array([[-2.0, -0.5, -1.2]]), jnp.array([np.exp(0.25) - 1])
    loss = jax.jit(lambda z: two_hot.two_hot_loss(z, returns, jnp.ones(1, bool), bins=BINS))
    np.testing.assert_allclose(loss(logits), [0.675 + np.log(1.0430601)], rtol=1e-5)
    # gradient: softmax - target
    probability = np.exp([-2.0, -0.5, -1.2]) / 1.0430601
    np.testing.assert_allclose(
        jax.grad(lambda z: loss(z).sum())(logits), [probability - [0, 0.75, 0.25]], rtol=1e-5, atol=1e-6
    )


def test_masked_tokens_have_no_loss_and_no_gradient():
    logits = jnp.array([[1.0, 2.0, 3.0], [NAN, 1.0, 1.0]])
    returns, mask = jnp.array([0.5, NAN]), jnp.array([True, False])
    fn = lambda z, r: two_hot.two_hot_loss(z, r, mask, bins=BINS)
    assert fn(logits, returns)[1] == 0 and fn(logits, returns)[0] > 0
    by_logits, by_returns = jax.grad(lambda z, r: fn(z, r).sum(), argnums=(0, 1))(logits, returns)
    np.testing.assert_array_equal(by_logits[1], 0)
    assert jnp.all(jnp.isfinite(by_logits))
    np.testing.assert_array_equal(by_returns, 0)


def test_a_head_that_is_sure_reads_its_bin_and_the_read_out_inverts_the_target():
    # a distribution that is the two-hot weights themselves reads the return again
    returns = jnp.array([0.3, -0.9, 1.2])
    weights = two_hot.two_hot(two_hot.symlog(returns), BINS)
    got = two_hot.two_hot_value(jnp.log(weights + 1e-30), bins=BINS)
    np.testing.assert_allclose(got, returns, rtol=1e-5)
    assert two_hot.two_hot_value(jnp.zeros((1, 3)), bins=BINS)[0] == 0  # zero weights of a head: a value of 0


def test_the_gradient_matches_finite_differences():
    with jax.enable_x64(True):
        logits = jax.random.normal(jax.random.key(0), (4, 3), jnp.float64)
        fn = lambda z: two_hot.two_hot_loss(z, jnp.array([0.1, -0.2, 1.0, 9.0]), jnp.ones(4, bool), bins=BINS)
        check_grads(fn, (logits,), order=1, modes=["rev"], atol=1e-7, rtol=1e-7)


def test_targets_out_of_range_are_told():
    # symlog(2) = 1.0986 is beyond 1, symlog(1.5) = 0.9163 is not
    got = two_hot.out_of_range(jnp.array([2.0, 1.5, -2.0, NAN]), jnp.array([True, True, True, False]), bins=BINS)
    np.testing.assert_array_equal(got, [True, False, True, False])
