"""Expert iteration by hand through its row."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import groups_of, loss_of, tokens

from jrl.algos import ALGOS
from jrl.algos.contract import Facts
from jrl.algos.expert_iteration import ExpertIteration

OBJECTIVE = ALGOS["ExpertIteration"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_rows_on_or_above_the_threshold_are_imitated():
    # threshold 0.5, at most two rows: group 0 one row on it; group 1 three rows, of which the first two; group 2 none
    groups = groups_of([0.5, 0.4, 1, 1, 0.7, 0, 0], [0, 0, 1, 1, 1, 2, 2])
    config, weights = ExpertIteration(threshold=0.5, max_kept=2), np.array([1, 0, 1, 1, 0, 0, 0])
    found, _, _ = OBJECTIVE.advantages(config, groups, groups.reward, ())
    np.testing.assert_allclose(found, [[0, w, w] for w in weights], rtol=1e-6)
    np.testing.assert_array_equal(OBJECTIVE.keep(config, groups), weights > 0)


def test_identical_answers_are_imitated_once():
    tokens = jnp.array([[9, 1, 1], [9, 1, 1], [9, 1, 2]], jnp.int32)
    groups = groups_of([1, 1, 1], [0, 0, 0]).replace(tokens=tokens)
    np.testing.assert_array_equal(OBJECTIVE.keep(ExpertIteration(), groups), [True, False, True])


def test_a_row_without_a_verdict_is_not_imitated():
    groups = groups_of([jnp.nan, 1, 1], [0, 0, 0], valid=[False, True, False])
    np.testing.assert_array_equal(OBJECTIVE.keep(ExpertIteration(), groups), [False, True, False])


def test_the_loss_is_the_likelihood_whatever_the_ratio():
    loss, _, gradient = loss_of(OBJECTIVE, ExpertIteration(), tokens([-2, -2, -1], [-1, -5, -1], [1, 0.5, 0]))
    np.testing.assert_allclose(loss, [2, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-1, -0.5, 0], rtol=1e-6)


def test_one_sample_a_prompt_will_do():
    OBJECTIVE.check(ExpertIteration(), FACTS._replace(samples=1))


def test_the_step_is_a_mean_over_tokens():
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_array_equal(OBJECTIVE.weights(ExpertIteration(), mask, 3), mask)
    assert OBJECTIVE.denominator(ExpertIteration(), mask, 8, 3) == 4


@pytest.mark.parametrize(
    "config, message",
    [
        (ExpertIteration(max_kept=0), r"ExpertIteration\.max_kept = 0 must be at least 1"),
        (ExpertIteration(threshold=float("nan")), r"ExpertIteration\.threshold = nan"),
    ],
)
def test_illegal_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)
