from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import coefficients


def kl(value, coefficient=0.1, rows=256, target=0.1):
    fn = jax.jit(lambda *a: coefficients.adapted_kl_coefficient(*a, target=target, horizon=10_000.0))
    return float(fn(jnp.float32(coefficient), jnp.float32(value), jnp.float32(rows)))


@pytest.mark.parametrize(
    "value, expected",
    [
        (0.15, 0.100512),  # 0.15 / 0.1 - 1 = 0.5, clipped to 0.2: 0.1 * (1 + 0.2 * 256 / 10000)
        (0.09, 0.099744),  # -0.1: 0.1 * (1 - 0.1 * 256 / 10000)
        (0.1, 0.1),
        (-5.0, 0.099488),  # clipped to -0.2
    ],
)
def test_the_kl_coefficient_by_hand(value, expected):
    np.testing.assert_allclose(kl(value), expected, rtol=1e-6)


def entropy(value, coefficient, largest=1.0):
    fn = jax.jit(lambda c, h: coefficients.adapted_entropy_coefficient(c, h, target=0.2, step=0.005, largest=largest))
    return float(fn(jnp.float32(coefficient), jnp.float32(value)))


@pytest.mark.parametrize(
    "value, coefficient, expected",
    [
        (0.1, 0.01, 0.015),  # too low: more
        (0.3, 0.01, 0.005),  # too high: less
        (0.2, 0.01, 0.005),  # on target: less
        (0.3, 0.002, 0.0),  # not below 0
        (0.1, 0.998, 1.0),  # not above the largest
    ],
)
def test_the_entropy_coefficient_by_hand(value, coefficient, expected):
    np.testing.assert_allclose(entropy(value, coefficient), expected, rtol=1e-5, atol=1e-8)
