"""RAFT by hand through its row."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import groups_of, loss_of, tokens

from jrl.algos import ALGOS
from jrl.algos.contract import Facts
from jrl.algos.raft import RAFT

OBJECTIVE = ALGOS["RAFT"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_the_best_row_of_a_prompt_is_imitated():
    # group 0: the second; group 1: two tie, of which the first is taken; group 2: no best
    groups = groups_of([0.2, 0.9, 1, 0, 1, 3, 3], [0, 0, 1, 1, 1, 2, 2])
    weights = [0, 1, 1, 0, 0, 0, 0]
    found, _, counters = OBJECTIVE.advantages(RAFT(), groups, groups.reward, ())
    np.testing.assert_array_equal(found, [[0, w, w] for w in weights])
    np.testing.assert_array_equal(OBJECTIVE.keep(RAFT(), groups), [w > 0 for w in weights])
    assert int(counters["zero_variance_groups"]) == 1


def test_a_row_without_a_verdict_is_not_the_best():
    groups = groups_of([jnp.nan, 0.5, 0.1], [0, 0, 0], valid=[False, True, True])
    np.testing.assert_array_equal(OBJECTIVE.keep(RAFT(), groups), [False, True, False])


def test_the_loss_is_the_likelihood_whatever_the_ratio():
    loss, _, gradient = loss_of(OBJECTIVE, RAFT(), tokens([-2, -2, -1], [-1, -5, -1], [1, 0.5, 0]))
    np.testing.assert_allclose(loss, [2, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-1, -0.5, 0], rtol=1e-6)


def test_the_step_is_a_mean_over_tokens():
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_array_equal(OBJECTIVE.weights(RAFT(), mask, 3), mask)
    assert OBJECTIVE.denominator(RAFT(), mask, 8, 3) == 4


def test_one_sample_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 2 of them, got samples=1"):
        OBJECTIVE.check(RAFT(), FACTS._replace(samples=1))
