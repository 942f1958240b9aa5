"""GMPO by hand through its row."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import loss_of, tokens

from jrl.algos import ALGOS
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts
from jrl.algos.gmpo import GMPO

OBJECTIVE = ALGOS["GMPO"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_the_loss_by_hand():
    # A = 1, d = [0.6, 0] held at 0.4: s = exp(0.2) = 1.221403; the first token has no gradient, the second (of a sum
    # over two tokens that both hold s) all of s. A = -1, d = -0.6 held at -0.4: exp(-0.4) = 0.670320
    batch = tokens([-0.4, -1, -1.6], [-1, -1, -1], [1, 1, -1], segment=[0, 0, 1])
    loss, metrics, gradient = loss_of(OBJECTIVE, GMPO(), batch)
    np.testing.assert_allclose(loss, [-1.2214028, -1.2214028, 0.67032], rtol=1e-5)
    np.testing.assert_allclose(gradient, [0, -1.2214028, 0], rtol=1e-5)
    np.testing.assert_array_equal(metrics["clip_fraction_high"], [1, 0, 0])
    np.testing.assert_array_equal(metrics["clip_fraction_low"], [0, 0, 1])


def test_advantages_are_those_of_grpo():
    groups = sample_groups()
    found, _, _ = OBJECTIVE.advantages(GMPO(), groups, groups.reward, ())
    expected, _, _ = ALGOS["GRPO"].advantages(ALGOS["GRPO"].config(), groups, groups.reward, ())
    np.testing.assert_array_equal(found, expected)


def test_the_step_is_a_mean_over_sequences():
    # rows of 1 and 3 tokens: weights 1 and 1/3 over 2 sequences, whatever their lengths
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_allclose(OBJECTIVE.weights(GMPO(), mask, 3), [[1, 0, 0], [1 / 3] * 3], rtol=1e-6)
    assert OBJECTIVE.denominator(GMPO(), mask, 8, 3) == 2


@pytest.mark.parametrize(
    "config, message",
    [
        (GMPO(log_clip_low=0.0), r"GMPO\.log_clip_low = 0\.0 must be above 0"),
        (GMPO(log_clip_high=-0.4), r"GMPO\.log_clip_high = -0\.4"),
    ],
)
def test_illegal_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)


def test_one_sample_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 2 of them, got samples=1"):
        OBJECTIVE.check(GMPO(), FACTS._replace(samples=1))
