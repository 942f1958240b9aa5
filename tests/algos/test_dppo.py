"""DPPO by hand through its row."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import loss_of, tokens

from jrl.algos import ALGOS
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts
from jrl.algos.dppo import DPPO
from jrl.resolve import load_config

OBJECTIVE = ALGOS["DPPO"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_the_loss_by_hand():
    # p = 0.9 against 0.6 by the sampler. A = 1: dropped; A = -1: -1.5 * -1 * log 0.9 = -0.158041, gradient 1.5
    p, q = np.log([0.9, 0.9]), np.log([0.6, 0.6])
    loss, metrics, gradient = loss_of(OBJECTIVE, DPPO(), tokens(p, p, [1, -1], behaviour=q))
    np.testing.assert_allclose(loss, [0, -0.1580408], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(gradient, [0, 1.5], rtol=1e-5)
    np.testing.assert_array_equal(metrics["rejected"], [1, 0])


def test_the_difference_is_to_the_sampler_and_not_to_the_old_policy():
    p, q = np.log([0.9]), np.log([0.6])
    assert loss_of(OBJECTIVE, DPPO(), tokens(p, q, [1], behaviour=p))[1]["rejected"][0] == 0
    assert loss_of(OBJECTIVE, DPPO(delta=0.31), tokens(p, p, [1], behaviour=q))[1]["rejected"][0] == 0


def test_advantages_are_those_of_dr_grpo():
    groups = sample_groups()
    found, _, _ = OBJECTIVE.advantages(DPPO(), groups, groups.reward, ())
    expected, _, _ = ALGOS["DrGRPO"].advantages(ALGOS["DrGRPO"].config(), groups, groups.reward, ())
    np.testing.assert_array_equal(found, expected)


def test_the_step_is_a_mean_over_tokens():
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_array_equal(OBJECTIVE.weights(DPPO(), mask, 3), mask)
    assert OBJECTIVE.denominator(DPPO(), mask, 8, 3) == 4


@pytest.mark.parametrize(
    "config, message",
    [
        (DPPO(delta=0.0), r"DPPO\.delta = 0\.0 must lie in \(0, 1\)"),
        (DPPO(delta=1.5), r"DPPO\.delta = 1\.5"),
    ],
)
def test_illegal_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)


def test_a_truncated_sampler_is_refused():
    # The policy has not moved: 0.4, drawn with 0.4 / 0.6 = 0.667 as top-p kept a mass of 0.6. 0.4 - 0.667 < -0.2.
    p, q = np.log([0.4]), np.log([0.4 / 0.6])
    assert loss_of(OBJECTIVE, DPPO(), tokens(p, p, [-1], behaviour=q))[1]["rejected"][0] == 1
    with pytest.raises(ValueError, match="tokens of a policy that has not moved would be dropped"):
        OBJECTIVE.check(DPPO(), FACTS._replace(truncated_sampling=True))
    load_config("configs/algos/dppo.gin", ["Sampler.top_p=1.0", "Sampler.min_p=0.0"])  # they keep every token


def test_one_sample_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 2 of them, got samples=1"):
        OBJECTIVE.check(DPPO(), FACTS._replace(samples=1))
