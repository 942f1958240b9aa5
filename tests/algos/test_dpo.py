"""DPO by hand: the running example of P0, the gradient's weight, masks, jit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos.contract import Facts, Sequences
from jrl.algos.dpo import DPO, OBJECTIVE

sequence_loss = OBJECTIVE.sequence_loss
FACTS = Facts(samples=1, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=8)


def pairs(logprob, ref_logprob, mask=None):
    """A row of pairs, the preferred sequence first."""
    logprob, ref_logprob = jnp.asarray([logprob], jnp.float32), jnp.asarray([ref_logprob], jnp.float32)
    places = logprob.shape[1]
    return Sequences(
        logprob=logprob,
        ref_logprob=ref_logprob,
        length=jnp.full((1, places), 10, jnp.int32),
        score=None,
        label=jnp.asarray([[1.0, 0.0] * (places // 2)], jnp.float32),
        unit=jnp.asarray([np.arange(places) // 2], jnp.int32),
        mask=jnp.ones((1, places), bool) if mask is None else jnp.asarray([mask]),
    )


# LP_w = -10, LP_ref_w = -11, LP_l = -12, LP_ref_l = -11: u_w = 1, u_l = -1, D = 2.
RUNNING = pairs([-10.0, -12.0], [-11.0, -11.0])


def test_the_running_example_by_hand():
    loss, metrics = jax.jit(sequence_loss)(DPO(beta=0.1), RUNNING, ())
    # -log sigmoid(0.1 * 2) = log(1 + e^-0.2) = log(1.818731) = 0.598139, on the preferred sequence's place
    np.testing.assert_allclose(loss, [[0.598139, 0]], 1e-6)
    np.testing.assert_allclose(metrics["pairs/margin"], [[2, 0]], 1e-6)
    np.testing.assert_allclose(metrics["pairs/preferred"], [[1, 0]], 1e-6)
    np.testing.assert_allclose(metrics["pairs/other"], [[-1, 0]], 1e-6)
    np.testing.assert_allclose(metrics["pairs/nll"], [[1, 0]], 1e-6)  # 10 / 10 tokens
    np.testing.assert_array_equal(metrics["pairs/accuracy"], [[1, 0]])
    tie = sequence_loss(DPO(beta=0.1), pairs([-10.0, -10.0], [-11.0, -11.0]), ())[1]
    np.testing.assert_array_equal(tie["pairs/accuracy"], [[0.5, 0]])
    near = sequence_loss(DPO(beta=0.1), pairs([-10.5, -11.0], [-11.0, -11.0]), ())[1]  # D = 0.5
    np.testing.assert_array_equal(near["pairs/accuracy"], [[1, 0]])
    margin = lambda lp: sequence_loss(DPO(), dataclasses.replace(RUNNING, logprob=lp), ())[1]["pairs/margin"].sum()
    np.testing.assert_array_equal(jax.grad(margin)(RUNNING.logprob), 0)


def test_the_gradient_pulls_both_answers_apart_with_one_weight():
    total = lambda lp: sequence_loss(DPO(beta=0.1), dataclasses.replace(RUNNING, logprob=lp), ())[0].sum()
    # d/dLP_w = -beta * sigmoid(-beta * D) = -0.1 * sigmoid(-0.2) = -0.0450166, and the opposite for the other answer
    np.testing.assert_allclose(jax.jit(jax.grad(total))(RUNNING.logprob), [[-0.0450166, 0.0450166]], 1e-5)


def test_a_policy_at_its_reference_has_the_loss_of_a_tie():
    same = pairs([-3.0, -7.0, -1.0, -1.0], [-3.0, -7.0, -1.0, -1.0])
    loss, metrics = sequence_loss(DPO(), same, ())
    np.testing.assert_allclose(loss, np.log(2) * np.array([[1, 0, 1, 0]]), 1e-6)
    np.testing.assert_array_equal(metrics["pairs/accuracy"], [[0.5, 0, 0.5, 0]])


def test_swapped_labels_change_the_sign_of_the_margin():
    swapped = dataclasses.replace(RUNNING, label=1 - RUNNING.label)
    # -log sigmoid(-0.2) = log(1 + e^0.2) = 0.798139
    np.testing.assert_allclose(sequence_loss(DPO(), swapped, ())[0], [[0, 0.798139]], 1e-6)


def test_a_masked_pair_is_not_seen_whatever_it_holds():
    nan = np.nan
    two = pairs([-10.0, -12.0, nan, nan], [-11.0, -11.0, nan, nan], mask=[True, True, False, False])
    total = lambda lp: sequence_loss(DPO(), dataclasses.replace(two, logprob=lp), ())[0].sum()
    np.testing.assert_allclose(total(two.logprob), 0.598139, 1e-6)
    np.testing.assert_allclose(jax.grad(total)(two.logprob), [[-0.0450166, 0.0450166, 0, 0]], 1e-5)


def test_a_beta_that_teaches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"DPO\.beta = 0"):
        OBJECTIVE.check(DPO(beta=0), FACTS)
