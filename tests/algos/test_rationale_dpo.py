"""DPO with rationales (P35), by hand, and its rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pair_objectives import DPO, FACTS, sequences

from jrl.algos import ALGOS
from jrl.algos.rationale_dpo import RationaleDPO

ROW = ALGOS["RationaleDPO"]
# The running pair, its rationale of five tokens with a mean NLL of 1.2, and one that is only a filler
BATCH = dataclasses.replace(
    sequences([-10.0, -12.0, -6.0, -99.0], [-11.0, -11.0, -9.0, -9.0], [10, 12, 5, 10], [1.0, 0.0, -1.0, -2.0]),
    unit=jnp.zeros((1, 4), jnp.int32),
)


def total(config, batch, logprob):
    return ROW.sequence_loss(config, batch.replace(logprob=logprob), ())[0].sum()


def test_by_hand():
    config = RationaleDPO(weight=0.1)
    loss, metrics = jax.jit(ROW.sequence_loss)(config, BATCH, ())
    np.testing.assert_allclose(loss, [[DPO, 0, 0.12, 0]], rtol=1e-5)  # 0.71814 together
    np.testing.assert_allclose(loss.sum(), 0.71814, atol=1e-5)
    np.testing.assert_allclose(metrics["pairs/rationale_nll"], [[0, 0, 1.2, 0]], rtol=1e-6)
    np.testing.assert_array_equal(metrics["pairs/rationale_share"], [[0, 0, 1, 0]])
    np.testing.assert_allclose(metrics["pairs/margin"], [[2, 0, 0, 0]])
    short, _ = ROW.sequence_loss(config, BATCH.replace(length=jnp.int32([[10, 12, 1, 10]])), ())
    np.testing.assert_allclose(short, [[DPO, 0, 0.6, 0]], rtol=1e-5)  # a rationale of one token
    slope = jax.grad(total, argnums=2)(config, BATCH, BATCH.logprob)
    # -beta sigmoid(-0.2) of the better answer, + of the other, -weight / 5 of the rationale
    np.testing.assert_allclose(slope, [[-0.0450166, 0.0450166, -0.02, 0]], rtol=1e-5)


def test_without_a_rationale_it_is_dpo():
    bare = BATCH.replace(label=jnp.float32([[1, 0, -2, -2]]))
    loss, metrics = ROW.sequence_loss(RationaleDPO(), bare, ())
    np.testing.assert_allclose(loss, [[DPO, 0, 0, 0]], rtol=1e-5)
    np.testing.assert_array_equal(metrics["pairs/rationale_share"], [[0, 0, 0, 0]])
    empty = BATCH.replace(length=jnp.int32([[10, 12, 0, 10]]))
    np.testing.assert_allclose(ROW.sequence_loss(RationaleDPO(), empty, ())[0], [[DPO, 0, 0, 0]], rtol=1e-5)


def test_the_step_is_a_mean_over_pairs_whatever_their_rationales():
    mask, unit = jnp.ones(6, bool), jnp.array([0, 0, 0, 1, 1, 1], jnp.int32)
    assert ROW.sequence_denominator(RationaleDPO(), mask, unit) == 2 and ROW.unit_size == 3


@pytest.mark.parametrize("field", ["beta", "weight"])
def test_coefficients_are_above_0(field):
    with pytest.raises(ValueError, match=rf"RationaleDPO\.{field} = 0\.0 must be above 0"):
        ROW.check(RationaleDPO(**{field: 0.0}), FACTS)
