"""KTO by hand: good and bad answers, the baseline of mismatched ones, masks, gradients."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos.contract import Facts, Sequences
from jrl.algos.kto import KTO, OBJECTIVE, sequence_baseline, sequence_loss

FACTS = Facts(samples=1, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=8)
NAN = np.nan

# A good answer (u = 1), its mismatch, a bad one (u = -1), its mismatch, and a place that is empty.
GIVEN = Sequences(
    logprob=jnp.float32([[-10.0, -9.0, -12.0, -13.0, NAN]]),
    ref_logprob=jnp.float32([[-11.0, -11.0, -11.0, -12.0, NAN]]),
    length=jnp.int32([[10, 10, 10, 10, 0]]),
    score=None,
    label=jnp.float32([[1, -1, 0, -1, -1]]),
    unit=jnp.int32([[0, 0, 1, 1, -1]]),
    mask=jnp.array([[True, True, True, True, False]]),
    baseline=jnp.full((1, 5), 0.5, jnp.float32),
)


def test_by_hand():
    loss, metrics = jax.jit(sequence_loss)(KTO(), GIVEN, ())
    # 1 - sigmoid(0.1 (1 - 0.5)) = 0.487503; 1 - sigmoid(0.1 (0.5 + 1)) = 0.462570
    np.testing.assert_allclose(loss, [[0.487503, 0, 0.462570, 0, 0]], 2e-6)
    np.testing.assert_allclose(metrics["kto/good"], [[1, 0, 0, 0, 0]], 1e-6)
    np.testing.assert_allclose(metrics["kto/bad"], [[0, 0, -1, 0, 0]], 1e-6)
    np.testing.assert_allclose(metrics["kto/baseline"], [[0.5, 0, 0.5, 0, 0]], 1e-6)
    weighed, _ = sequence_loss(KTO(good_weight=2.0, bad_weight=3.0), GIVEN, ())
    np.testing.assert_allclose(weighed, [[0.975006, 0, 1.387710, 0, 0]], 2e-6)


def test_the_gradient_raises_the_good_and_lowers_the_bad():
    total = lambda lp: sequence_loss(KTO(), dataclasses.replace(GIVEN, logprob=lp), ())[0].sum()
    # good: -beta s (1 - s) = -0.1 * 0.487503 * 0.512497; bad: +0.1 * 0.462570 * 0.537430
    gradient = jax.jit(jax.grad(total))(GIVEN.logprob)
    np.testing.assert_allclose(gradient, [[-0.0249844, 0, 0.0248599, 0, 0]], 1e-5)


def test_the_baseline_is_the_mean_gain_of_mismatched_answers():
    # (2 - 1) / 2 = 0.5; labeled answers and empty places do not count
    np.testing.assert_allclose(jax.jit(sequence_baseline)(KTO(), GIVEN), 0.5, 1e-6)
    below = dataclasses.replace(GIVEN, logprob=GIVEN.logprob - 4)
    assert sequence_baseline(KTO(), below) == 0  # never below 0
    alone = dataclasses.replace(GIVEN, label=jnp.abs(GIVEN.label))
    assert sequence_baseline(KTO(), alone) == 0  # without a mismatch
    total = lambda z: sequence_loss(KTO(), dataclasses.replace(GIVEN, baseline=z), ())[0].sum()
    assert not jax.grad(total)(GIVEN.baseline).any()


@pytest.mark.parametrize("field", ["beta", "good_weight", "bad_weight"])
def test_what_makes_no_sense_is_refused_by_name(field):
    OBJECTIVE.check(KTO(), FACTS)
    with pytest.raises(ValueError, match=rf"KTO\.{field} = 0"):
        OBJECTIVE.check(KTO(**{field: 0.0}), FACTS)
