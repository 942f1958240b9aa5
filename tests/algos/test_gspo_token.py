"""GSPO-token by hand through its row, and where it differs from GSPO."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import loss_of, tokens

from jrl.algos import ALGOS
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts
from jrl.algos.gspo_token import GSPOToken

OBJECTIVE = ALGOS["GSPOToken"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_the_loss_by_hand():
    # two sequences in a row: s = exp((0.2 + 0.1) / 2) = 1.161834 at A = -1; exp(-0.3) = 0.740818 at A = 1
    batch = tokens([-0.8, -0.9, -1.3], [-1, -1, -1], [-1, -1, 1], segment=[0, 0, 1])
    loss, metrics, gradient = loss_of(OBJECTIVE, GSPOToken(), batch)
    np.testing.assert_allclose(loss, [1.1618342, 1.1618342, -0.7408182], rtol=1e-6)
    np.testing.assert_allclose(gradient, [1.1618342, 1.1618342, -0.7408182], rtol=1e-6)  # of the sum over the tokens
    np.testing.assert_allclose(metrics["sequence_ratio"], [1.1618342, 1.1618342, 0.7408182], rtol=1e-6)
    np.testing.assert_array_equal(metrics["clip_fraction_low"], 0)


def test_the_narrow_clip_binds_and_is_counted():
    # s = exp(0.01) > 1.0004 at A = 1: -1.0004, no gradient; exp(-0.01) < 0.9997 at A = -1: 0.9997
    batch = tokens([-0.99, -1.01], [-1, -1], [1, -1], segment=[0, 1])
    loss, metrics, gradient = loss_of(OBJECTIVE, GSPOToken(), batch)
    np.testing.assert_allclose(loss, [-1.0004, 0.9997], rtol=1e-6)
    np.testing.assert_array_equal(gradient, 0)
    np.testing.assert_array_equal(metrics["clip_fraction_high"], [1, 0])
    np.testing.assert_array_equal(metrics["clip_fraction_low"], [0, 1])


def test_the_gradient_of_a_token_is_its_own_advantage():
    # s = exp(-0.1): -A_t * s each; GSPO would share them
    loss, _, gradient = loss_of(OBJECTIVE, GSPOToken(), tokens([-1.1, -1.1], [-1, -1], [1, 0]))
    np.testing.assert_allclose(loss, [-0.9048374, 0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.9048374, 0], rtol=1e-6)
    shared = lambda lp: ALGOS["GSPO"].token_loss(GSPOToken(), tokens(lp, [-1, -1], [1, 0]), ())[0].sum()
    np.testing.assert_allclose(jax.grad(shared)(jnp.array([-1.1, -1.1])), [-0.4524187] * 2, rtol=1e-6)


def test_advantages_are_those_of_grpo():
    groups = sample_groups()
    found, _, _ = OBJECTIVE.advantages(GSPOToken(), groups, groups.reward, ())
    expected, _, _ = ALGOS["GRPO"].advantages(ALGOS["GRPO"].config(), groups, groups.reward, ())
    np.testing.assert_array_equal(found, expected)


def test_the_step_is_a_mean_over_sequences():
    # rows of 1 and 3 tokens: weights 1 and 1/3 over 2 sequences, whatever their lengths
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_allclose(OBJECTIVE.weights(GSPOToken(), mask, 3), [[1, 0, 0], [1 / 3] * 3], rtol=1e-6)
    assert OBJECTIVE.denominator(GSPOToken(), mask, 8, 3) == 2


@pytest.mark.parametrize(
    "config, message",
    [
        (GSPOToken(clip_low=1.0), r"GSPOToken\.clip_low = 1\.0"),
        (GSPOToken(clip_high=-0.1), r"GSPOToken\.clip_high = -0\.1"),
    ],
)
def test_illegal_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)


def test_one_sample_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 2 of them, got samples=1"):
        OBJECTIVE.check(GSPOToken(), FACTS._replace(samples=1))
