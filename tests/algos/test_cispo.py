"""CISPO by hand through its row."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import loss_of, tokens

from jrl.algos import ALGOS
from jrl.algos.cispo import CISPO
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts

OBJECTIVE = ALGOS["CISPO"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_the_loss_by_hand():
    # rho = 6, cut to 5: -5 * 1 * -2 = 10, gradient -5; rho = 0.5: -0.5 * -1 * -2 = -1, gradient 0.5
    new = np.array([-2.0, -2.0])
    loss, metrics, gradient = loss_of(OBJECTIVE, CISPO(), tokens(new, new - np.log([6, 0.5]), [1, -1]))
    np.testing.assert_allclose(loss, [10, -1], rtol=1e-5)
    np.testing.assert_allclose(gradient, [-5, 0.5], rtol=1e-5)
    np.testing.assert_array_equal(metrics["weight_cut"], [1, 0])


def test_advantages_are_those_of_grpo():
    groups = sample_groups()
    found, _, _ = OBJECTIVE.advantages(CISPO(), groups, groups.reward, ())
    expected, _, _ = ALGOS["GRPO"].advantages(ALGOS["GRPO"].config(), groups, groups.reward, ())
    np.testing.assert_array_equal(found, expected)


def test_the_step_is_a_mean_over_tokens():
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_array_equal(OBJECTIVE.weights(CISPO(), mask, 3), mask)
    assert OBJECTIVE.denominator(CISPO(), mask, 8, 3) == 4


@pytest.mark.parametrize(
    "config, message",
    [
        (CISPO(max_weight=0.2), r"CISPO\.max_weight = 0\.2 must be at least 1"),
        (CISPO(max_weight=float("nan")), r"max_weight = nan"),
    ],
)
def test_illegal_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)


def test_one_sample_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 2 of them, got samples=1"):
        OBJECTIVE.check(CISPO(), FACTS._replace(samples=1))
