"""Kimi's mirror descent by hand through its row."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import loss_of, tokens

from jrl.algos import ALGOS
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts
from jrl.algos.kimi_mirror_descent import KimiMirrorDescent

OBJECTIVE = ALGOS["KimiMirrorDescent"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_the_loss_by_hand():
    # LP = -10, LP_old = -10.2, A = 0.5, tau = 0.1: 5 + 0.05 * 0.04 = 5.002; gradient of a sequence -0.5 + 0.02
    batch = tokens([-4, -6], [-4.5, -5.7], [0.5, 0.5])
    loss, _, gradient = loss_of(OBJECTIVE, KimiMirrorDescent(), batch)
    np.testing.assert_allclose(loss, [5.002] * 2, rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.48 * 2] * 2, rtol=1e-5)  # of a sum over two tokens that both hold it
    # per token: LP = -5, LP_old = -5.1: 2.5 + 0.05 * 0.01
    loss, _, _ = loss_of(OBJECTIVE, KimiMirrorDescent(per="token"), batch)
    np.testing.assert_allclose(loss, [2.5005] * 2, rtol=1e-6)


def test_sequences_are_summed_apart():
    batch = tokens([-4, -6], [-4, -6], [1, -1], segment=[0, 1])
    np.testing.assert_allclose(loss_of(OBJECTIVE, KimiMirrorDescent(), batch)[0], [4, -6], rtol=1e-6)


def test_advantages_are_those_of_dr_grpo():
    groups = sample_groups()
    found, _, _ = OBJECTIVE.advantages(KimiMirrorDescent(), groups, groups.reward, ())
    expected, _, _ = ALGOS["DrGRPO"].advantages(ALGOS["DrGRPO"].config(), groups, groups.reward, ())
    np.testing.assert_array_equal(found, expected)


def test_the_step_is_a_mean_over_sequences():
    # rows of 1 and 3 tokens: weights 1 and 1/3 over 2 sequences, whatever their lengths
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_allclose(OBJECTIVE.weights(KimiMirrorDescent(), mask, 3), [[1, 0, 0], [1 / 3] * 3], rtol=1e-6)
    assert OBJECTIVE.denominator(KimiMirrorDescent(), mask, 8, 3) == 2


@pytest.mark.parametrize(
    "config, message",
    [
        (KimiMirrorDescent(tau=0.0), r"KimiMirrorDescent\.tau = 0\.0 must be above 0"),
        (KimiMirrorDescent(per="row"), r"per = 'row' must be 'sequence'"),
    ],
)
def test_illegal_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)


def test_one_sample_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 2 of them, got samples=1"):
        OBJECTIVE.check(KimiMirrorDescent(), FACTS._replace(samples=1))
