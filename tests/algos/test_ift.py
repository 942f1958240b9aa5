"""IFT by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import loss_of, tokens
from test_pair_objectives import FACTS

from jrl.algos.ift import IFT, OBJECTIVE


def test_a_token_counts_by_the_loss_that_follows_from_it():
    batch = tokens([-1.0, -2.0, -3.0], [0.0] * 3, [0.0] * 3, segment=[0, 0, 1])
    loss, _, gradient = loss_of(OBJECTIVE, IFT(), batch)
    # weights 2 * 1.45 / 2.45 and 2 * 1 / 2.45; 1 of the only token of the other completion
    np.testing.assert_allclose(loss, [1.183673, 1.632653, 3.0], 1e-5)
    np.testing.assert_allclose(gradient, [-1.183673, -0.816327, -1.0], 1e-5)
    by_itself = loss_of(OBJECTIVE, IFT(discount=0.0), batch)[2]
    np.testing.assert_allclose(by_itself, [-2 / 3, -4 / 3, -1.0], 1e-5)


def test_nothing_under_the_mask_gets_through():
    batch = tokens([-1.0, np.nan, -2.0], [0.0] * 3, [0.0] * 3).replace(mask=jnp.array([True, False, True]))
    loss, _, gradient = loss_of(OBJECTIVE, IFT(), batch)
    np.testing.assert_allclose(loss, [1.183673, 0, 1.632653], 1e-5)
    np.testing.assert_allclose(gradient, [-1.183673, 0, -0.816327], 1e-5)


def test_a_discount_is_a_share():
    with pytest.raises(ValueError, match=r"IFT\.discount = 1\.5 must be in \[0, 1\]; 0\.95 is usual"):
        OBJECTIVE.check(IFT(discount=1.5), FACTS)
