from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jrl.ops import kl

NAN = float("nan")

ONE = jnp.ones(1, bool)
ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


def of(fn, d):
    """Returns value and derivative by the log-prob where logprobs - ref_logprobs = d."""
    reference = jnp.full(1, -2.0)
    value = jax.jit(lambda lp: fn(lp, reference, ONE)[0])
    return value(reference + d), jax.grad(value)(reference + d)[0]


@pytest.mark.parametrize(
    "name, d, expected",
    [
        ("k1", 0.5, 0.5),
        ("k1", -0.2, -0.2),
        ("k2", 0.5, 0.125),  # 0.5^2 / 2
        ("k2", -0.2, 0.02),
        ("k3", 0.5, 0.1065307),  # exp(-0.5) - 1 + 0.5
        ("k3", -0.2, 0.0214028),  # exp(0.2) - 1 - 0.2
        ("k3", -0.5, 0.1487213),  # exp(0.5) - 1 - 0.5
    ],
)
def test_estimators_by_hand(name, d, expected):
    np.testing.assert_allclose(of(ESTIMATORS[name], d)[0], expected, rtol=2e-5)


def test_gradient_coefficients_by_hand():
    # at d = 0.5: k1 1; k2 d = 0.5; k3 1 - exp(-0.5) = 0.393469
    assert of(kl.k1, 0.5)[1] == 1
    np.testing.assert_allclose(of(kl.k2, 0.5)[1], 0.5, rtol=1e-6)
    np.testing.assert_allclose(of(kl.k3, 0.5)[1], 0.3934693, rtol=1e-6)


def test_corrected_k3_by_hand():
    # rho = exp(0.1), d = 0.5: exp(0.1) * 0.106531 = 0.117735; gradient rho * (k3 + 1 - exp(-d)) = exp(0.1) * 0.5
    reference, old = jnp.array([-2.5]), jnp.array([-2.1])
    value = jax.jit(lambda lp: kl.corrected_k3(lp, old, reference, ONE)[0])
    new = jnp.array([-2.0])
    np.testing.assert_allclose(value(new), np.exp(0.1) * 0.1065307, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(value)(new)[0], np.exp(0.1) * 0.5, rtol=1e-5)


def test_straight_through_k3_by_hand():
    # at d = 0.5: the value of k3, 0.106531, and the gradient of k2, 0.5
    value, gradient = of(kl.straight_through_k3, 0.5)
    np.testing.assert_allclose(value, 0.1065307, rtol=1e-5)
    np.testing.assert_allclose(gradient, 0.5, rtol=1e-6)


def test_corrected_k3_at_ratio_one_has_the_value_of_k3_and_the_gradient_of_k2():
    with jax.enable_x64(True):
        new, reference = jax.random.normal(jax.random.key(0), (2, 30), jnp.float64)
        mask = jnp.ones(30, bool)
        np.testing.assert_allclose(kl.corrected_k3(new, new, reference, mask), kl.k3(new, reference, mask), rtol=1e-12)
        corrected = jax.grad(lambda lp: kl.corrected_k3(lp, new, reference, mask).sum())(new)
        squared = jax.grad(lambda lp: kl.k2(lp, reference, mask).sum())(new)
        np.testing.assert_allclose(corrected, squared, rtol=1e-10, atol=1e-12)


def test_expected_gradients_are_the_ones_of_the_table():
    # Exact expectation over a vocabulary: sum_v sg(p_v) * d estimator_v / d logits against the KLs themselves.
    with jax.enable_x64(True):
        logits, ref_logits = jax.random.normal(jax.random.key(1), (2, 7), jnp.float64)
        reference, mask = jax.nn.log_softmax(ref_logits), jnp.ones(7, bool)
        old = jax.nn.log_softmax(logits)

        def expected(estimator):
            def mean(z):
                logprobs = jax.nn.log_softmax(z)
                return (jnp.exp(old) * estimator(logprobs)).sum()

            return jax.grad(mean)(logits)

        def divergence(p, q):
            return (jnp.exp(p) * (p - q)).sum()

        reverse = jax.grad(lambda z: divergence(jax.nn.log_softmax(z), reference))(logits)
        forward = jax.grad(lambda z: divergence(reference, jax.nn.log_softmax(z)))(logits)
        close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12)
        close(expected(lambda lp: kl.k1(lp, reference, mask)), jnp.zeros(7))
        close(expected(lambda lp: kl.k2(lp, reference, mask)), reverse)
        close(expected(lambda lp: kl.k3(lp, reference, mask)), forward)
        close(expected(lambda lp: kl.corrected_k3(lp, old, reference, mask)), reverse)
        close(expected(lambda lp: kl.straight_through_k3(lp, reference, mask)), reverse)


def test_k1_and_k3_are_unbiased():
    with jax.enable_x64(True):
        new, reference = jax.nn.log_softmax(jax.random.normal(jax.random.key(2), (2, 7), jnp.float64))
        mask, true = jnp.ones(7, bool), (jnp.exp(new) * (new - reference)).sum()
        for fn in (kl.k1, kl.k3):
            np.testing.assert_allclose((jnp.exp(new) * fn(new, reference, mask)).sum(), true, rtol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_gradient_matches_finite_differences(name):
    with jax.enable_x64(True):
        new, reference = jax.random.normal(jax.random.key(3), (2, 5), jnp.float64)
        fn = lambda lp: ESTIMATORS[name](lp, reference, jnp.ones(5, bool))
        check_grads(fn, (new,), order=1, modes=["rev"], atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("name", [*ESTIMATORS, "corrected", "straight"])
def test_masked_tokens_give_no_value_and_no_gradient(name):
    new, reference = jnp.array([-1.0, NAN, -1.0]), jnp.array([-1.5, -1.0, NAN])
    mask = jnp.array([True, False, False])
    fns = {
        **ESTIMATORS,
        "corrected": lambda lp, ref, m: kl.corrected_k3(lp, lp, ref, m),
        "straight": kl.straight_through_k3,
    }
    value, gradient = (
        fns[name](new, reference, mask),
        jax.grad(lambda lp: fns[name](lp, reference, mask).sum())(new),
    )
    assert value[0] > 0 and gradient[0] > 0
    np.testing.assert_array_equal(value[1:], 0)
    np.testing.assert_array_equal(gradient[1:], 0)


def test_k3_keeps_its_precision_near_zero():
    # d = 1e-4 in float32: d^2 / 2 = 5e-9, far below the rounding of 1
    np.testing.assert_allclose(kl.k3(jnp.array([1e-4]), jnp.zeros(1), ONE), 5e-9, rtol=1e-2)


def test_k3_is_clamped_and_k1_is_not():
    new, reference = jnp.array([-60.0]), jnp.array([-10.0])
    np.testing.assert_allclose(kl.k3(new, reference, ONE), np.exp(20.0) - 21, rtol=1e-5)
    assert kl.k1(new, reference, ONE)[0] == -50
