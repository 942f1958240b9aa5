"""SAPO by hand through its row."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import loss_of, tokens

from jrl.algos import ALGOS
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts
from jrl.algos.sapo import SAPO

OBJECTIVE = ALGOS["SAPO"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_the_loss_by_hand():
    # rho = 2: A = 1, tau = 1: -4 * sigmoid(1) = -2.924234; A = -1, tau = 1.05: 4 / 1.05 * sigmoid(1.05) = 2.822000
    new = np.array([-2.0, -2.0])
    loss, _, gradient = loss_of(OBJECTIVE, SAPO(), tokens(new, new - np.log(2), [1, -1]))
    np.testing.assert_allclose(loss, [-2.9242343, 4 / 1.05 / (1 + np.exp(-1.05))], rtol=1e-6)
    # f' = 4 * sigmoid(1) * sigmoid(-1) = 0.786448, times rho; 4 * sigmoid(1.05) * sigmoid(-1.05) = 0.768110
    np.testing.assert_allclose(gradient, [-2 * 0.7864477, 2 * 0.7681096], rtol=1e-5)


def test_on_its_own_samples_it_has_the_gradient_of_grpo():
    batch = tokens([-1, -2, -0.5], [-1, -2, -0.5], [0.7, -1.2, 0.1])
    np.testing.assert_allclose(loss_of(OBJECTIVE, SAPO(), batch)[2], [-0.7, 1.2, -0.1], rtol=1e-6)


def test_advantages_are_those_of_grpo():
    groups = sample_groups()
    found, _, _ = OBJECTIVE.advantages(SAPO(), groups, groups.reward, ())
    expected, _, _ = ALGOS["GRPO"].advantages(ALGOS["GRPO"].config(), groups, groups.reward, ())
    np.testing.assert_array_equal(found, expected)


def test_the_step_is_a_mean_over_sequences():
    # rows of 1 and 3 tokens: weights 1 and 1/3 over 2 sequences, whatever their lengths
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_allclose(OBJECTIVE.weights(SAPO(), mask, 3), [[1, 0, 0], [1 / 3] * 3], rtol=1e-6)
    assert OBJECTIVE.denominator(SAPO(), mask, 8, 3) == 2


@pytest.mark.parametrize(
    "config, message",
    [
        (SAPO(positive_temperature=0.0), r"SAPO\.positive_temperature = 0\.0 must be above 0"),
        (SAPO(negative_temperature=-1.0), r"SAPO\.negative_temperature = -1\.0"),
    ],
)
def test_illegal_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)


def test_one_sample_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 2 of them, got samples=1"):
        OBJECTIVE.check(SAPO(), FACTS._replace(samples=1))
