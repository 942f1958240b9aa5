"""Masked GRPO by hand through its row."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import loss_of, tokens

from jrl.algos import ALGOS
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts
from jrl.algos.masked_grpo import MaskedGRPO

OBJECTIVE = ALGOS["MaskedGRPO"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


# w = exp([0.6, 0.6]) for the first sequence, product 3.32, mean 1.82; exp([0.9, -0.9]) for the second, product 1
OLD = np.array([-2.0, -2.0, -2.0, -2.0])
BEHAVIOUR = OLD - np.array([0.6, 0.6, 0.9, -0.9])
SEGMENT = [0, 0, 1, 1]


@pytest.mark.parametrize(
    "config, rejected",
    [
        (MaskedGRPO(), [1, 1, 0, 0]),  # 3.32 > 3
        (MaskedGRPO(high=3.5), [0, 0, 0, 0]),
        (MaskedGRPO(level="geometric", high=1.5), [1, 1, 0, 0]),
        (MaskedGRPO(level="geometric", high=1.9), [0, 0, 0, 0]),
        (MaskedGRPO(level="every_token", high=2.0), [0, 0, 1, 1]),  # exp(0.9) = 2.46
        (MaskedGRPO(level="every_token", low=0.5), [0, 0, 1, 1]),  # exp(-0.9) = 0.41
    ],
)
def test_whole_sequences_are_rejected(config, rejected):
    batch = tokens(OLD + 0.1, OLD, [1, 1, 1, 1], behaviour=BEHAVIOUR, segment=SEGMENT)
    loss, metrics, gradient = loss_of(OBJECTIVE, config, batch)
    np.testing.assert_array_equal(metrics["rejected"], rejected)
    expected = -np.exp(0.1) * (1 - np.array(rejected))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_failed_sequences_that_the_policy_has_left_are_dropped_where_asked():
    # mean(behaviour - new) = 0.3 in both; only the second has failed
    batch = tokens(OLD - 0.3, OLD, [1, 1, -1, -1], segment=SEGMENT)
    assert loss_of(OBJECTIVE, MaskedGRPO(), batch)[1]["rejected"].sum() == 0
    np.testing.assert_array_equal(loss_of(OBJECTIVE, MaskedGRPO(delta=0.2), batch)[1]["rejected"], [0, 0, 1, 1])
    assert loss_of(OBJECTIVE, MaskedGRPO(delta=0.4), batch)[1]["rejected"].sum() == 0


def test_a_drift_from_a_truncated_sampler_is_refused():
    # The policy has not moved; top-p kept a mass of 0.85 at every token: mean(behaviour - new) = -log 0.85 = 0.1625.
    batch = tokens(OLD, OLD, [1, 1, -1, -1], behaviour=OLD - np.log(0.85), segment=SEGMENT)
    np.testing.assert_array_equal(loss_of(OBJECTIVE, MaskedGRPO(delta=0.1), batch)[1]["rejected"], [0, 0, 1, 1])
    truncated = FACTS._replace(truncated_sampling=True)
    with pytest.raises(ValueError, match=r"MaskedGRPO\.delta = 0\.1 measures drift"):
        OBJECTIVE.check(MaskedGRPO(delta=0.1), truncated)
    OBJECTIVE.check(MaskedGRPO(), truncated)  # a product of weights below 1 stays below `high`


def test_advantages_are_those_of_grpo():
    groups = sample_groups()
    found, _, _ = OBJECTIVE.advantages(MaskedGRPO(), groups, groups.reward, ())
    expected, _, _ = ALGOS["GRPO"].advantages(ALGOS["GRPO"].config(), groups, groups.reward, ())
    np.testing.assert_array_equal(found, expected)


def test_the_step_is_a_mean_over_sequences():
    # rows of 1 and 3 tokens: weights 1 and 1/3 over 2 sequences, whatever their lengths
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_allclose(OBJECTIVE.weights(MaskedGRPO(), mask, 3), [[1, 0, 0], [1 / 3] * 3], rtol=1e-6)
    assert OBJECTIVE.denominator(MaskedGRPO(), mask, 8, 3) == 2


@pytest.mark.parametrize(
    "config, message",
    [
        (MaskedGRPO(clip_low=1.0), r"MaskedGRPO\.clip_low = 1\.0"),
        (MaskedGRPO(clip_high=-0.1), r"MaskedGRPO\.clip_high = -0\.1"),
        (MaskedGRPO(level="row"), r"level = 'row' must be one of 'sequence'"),
        (MaskedGRPO(high=0.9), r"high = 0\.9"),
        (MaskedGRPO(delta=0.0), r"MaskedGRPO\.delta = 0\.0 must be above 0"),
    ],
)
def test_illegal_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)


def test_one_sample_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 2 of them, got samples=1"):
        OBJECTIVE.check(MaskedGRPO(), FACTS._replace(samples=1))
