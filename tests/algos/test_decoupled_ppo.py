"""Decoupled PPO by hand through its row."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import loss_of, tokens

from jrl.algos import ALGOS
from jrl.algos.common import TruncatedImportance
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts
from jrl.algos.decoupled_ppo import DecoupledPPO
from jrl.algos.grpo import GRPO

OBJECTIVE = ALGOS["DecoupledPPO"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_the_loss_by_hand():
    # new -0.9, old -1.0, A = 1. Behaviour -1.2: -exp(0.2) * exp(0.1) = -1.349859; -3: weight exp(2) cut to 2: -2.210342
    batch = tokens([-0.9, -0.9], [-1, -1], [1, 1], behaviour=[-1.2, -3])
    loss, metrics, gradient = loss_of(OBJECTIVE, DecoupledPPO(), batch)
    np.testing.assert_allclose(loss, [-1.3498588, -2.2103418], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-1.3498588, -2.2103418], rtol=1e-6)
    np.testing.assert_allclose(metrics["importance_weight"], [1.2214028, 2], rtol=1e-6)
    np.testing.assert_array_equal(metrics["importance_capped"], [0, 1])


def test_it_is_grpo_with_truncated_importance():
    batch = tokens([-0.5, -1.9, -1], [-1, -1.4, -1.1], [1, -1, 0.3], behaviour=[-1.3, -1, -4])
    expected, _ = ALGOS["GRPO"].token_loss(GRPO(importance=TruncatedImportance(cap=2.0)), batch, ())
    np.testing.assert_allclose(loss_of(OBJECTIVE, DecoupledPPO(), batch)[0], expected, rtol=1e-6)


def test_advantages_are_those_of_grpo():
    groups = sample_groups()
    found, _, _ = OBJECTIVE.advantages(DecoupledPPO(), groups, groups.reward, ())
    expected, _, _ = ALGOS["GRPO"].advantages(ALGOS["GRPO"].config(), groups, groups.reward, ())
    np.testing.assert_array_equal(found, expected)


def test_the_step_is_a_mean_over_tokens():
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_array_equal(OBJECTIVE.weights(DecoupledPPO(), mask, 3), mask)
    assert OBJECTIVE.denominator(DecoupledPPO(), mask, 8, 3) == 4


@pytest.mark.parametrize(
    "config, message",
    [
        (DecoupledPPO(clip_low=1.0), r"DecoupledPPO\.clip_low = 1\.0"),
        (DecoupledPPO(clip_high=-0.1), r"DecoupledPPO\.clip_high = -0\.1"),
        (DecoupledPPO(cap=0.0), r"DecoupledPPO\.cap = 0\.0 must be above 0"),
    ],
)
def test_illegal_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)


def test_one_sample_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 2 of them, got samples=1"):
        OBJECTIVE.check(DecoupledPPO(), FACTS._replace(samples=1))
