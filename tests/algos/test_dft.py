"""DFT by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from small_batches import loss_of, tokens

from jrl.algos.dft import DFT, OBJECTIVE


def test_a_token_counts_by_its_probability_without_a_gradient_through_it():
    batch = tokens(np.log([0.5, 0.25, 1.0]), [0.0] * 3, [0.0] * 3)
    loss, metrics, gradient = loss_of(OBJECTIVE, DFT(), batch)
    np.testing.assert_allclose(loss, [0.346574, 0.346574, 0], 1e-5)  # -0.5 log 0.5, -0.25 log 0.25
    np.testing.assert_allclose(metrics["dft/probability"], [0.5, 0.25, 1.0], 1e-6)
    np.testing.assert_allclose(gradient, [-0.5, -0.25, -1.0], 1e-6)


def test_nothing_under_the_mask_gets_through():
    batch = tokens([np.log(0.5), np.nan], [0.0] * 2, [0.0] * 2).replace(mask=jnp.array([True, False]))
    loss, metrics, gradient = loss_of(OBJECTIVE, DFT(), batch)
    np.testing.assert_allclose(loss, [0.346574, 0], 1e-5)
    np.testing.assert_allclose(metrics["dft/probability"], [0.5, 0], 1e-6)
    np.testing.assert_allclose(gradient, [-0.5, 0], 1e-6)
