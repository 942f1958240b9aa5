"""Rewards of outcomes, sums, steps, repetition and hindsight, by hand."""

from __future__ import annotations

import math

import pytest

from jrl.tasks.rewards import process
from jrl.tasks.rewards.hindsight import hindsight_reward
from jrl.tasks.rewards.outcome import constraints_met, outcome
from jrl.tasks.rewards.repetition import repetition
from jrl.tasks.rewards.weighted import weighted_sum

NAN = math.nan


def test_an_outcome_by_hand():
    assert outcome(True) == 1.0 and outcome(False) == 0.0 and outcome(True, 10.0) == 10.0 and outcome(False, 10.0) == 0


def test_constraints_by_hand():
    met = [True, False, True]
    assert constraints_met(met, partial=True) == pytest.approx(0.66667, abs=5e-6)  # 2 / 3
    assert constraints_met(met, partial=False) == 0.0 and constraints_met([True, True], partial=False, scale=2.0) == 2.0
    assert constraints_met(met, partial=True, scale=3.0) == pytest.approx(2.0)
    assert math.isnan(constraints_met([], partial=True)) and math.isnan(constraints_met([], partial=False))


def test_a_weighted_sum_by_hand():
    assert weighted_sum([1.0, 0.4], [1.0, 0.5]) == pytest.approx(1.2)  # 1 * 1 + 0.5 * 0.4
    assert weighted_sum([], []) == 0.0
    assert math.isnan(weighted_sum([1.0, None], [1.0, 0.0])) and math.isnan(weighted_sum([1.0, NAN], [1.0, 0.0]))
    with pytest.raises(ValueError, match="longer"):
        weighted_sum([1.0, 2.0], [1.0])


def test_steps_as_an_outcome_by_hand():
    scores = [0.9, 0.6, 0.8]
    assert process.product_of_steps(scores) == pytest.approx(0.432)  # 0.9 * 0.6 * 0.8
    assert process.worst_step(scores) == 0.6 and process.last_step(scores) == 0.8
    assert process.mean_of_steps(scores) == pytest.approx(2.3 / 3)


@pytest.mark.parametrize(
    "reward", [process.product_of_steps, process.worst_step, process.last_step, process.mean_of_steps]
)
def test_one_step_is_its_score_and_none_is_missing(reward):
    assert reward([0.3]) == 0.3 and math.isnan(reward([]))


def test_steps_as_rewards_by_hand():
    scores = [0.9, 0.6, 0.8]
    assert process.step_values(scores) == scores
    # 0.9 - 0.5, 0.6 - 0.9, 0.8 - 0.6, whose sum is 0.8 - 0.5
    assert process.step_differences(scores, 0.5) == pytest.approx([0.4, -0.3, 0.2])
    assert sum(process.step_differences(scores, 0.5)) == pytest.approx(0.3)
    assert process.step_differences([], 0.5) == []


def test_repetition_by_hand():
    # Bigrams ab, ba, ab, ba, ab: 2 of 5 are distinct, 1 - 2 / 5
    assert repetition("a b a b a b".split(), 2) == pytest.approx(0.6)
    assert repetition([1, 2, 3, 4], 2) == 0.0 and repetition([1, 1], 1) == 0.5
    assert repetition([1], 2) == 0.0 and repetition([], 1) == 0.0 and repetition([1, 1], 2) == 0.0


def test_in_hindsight_the_score_counts_where_there_is_an_outcome():
    assert hindsight_reward(-1.0, "bought the wrong item") == -1.0 and hindsight_reward(0.0, "went home") == 0.0
    # Without a simulated outcome there is no reward, which is not a reward of 0.
    assert math.isnan(hindsight_reward(1.0, None)) and math.isnan(hindsight_reward(1.0, " \n"))
