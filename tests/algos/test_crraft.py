from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import loss_of, tokens
from test_crpg import FACTS, NAN, groups

from jrl.algos import ALGOS
from jrl.algos.crraft import CRRAFT

OBJECTIVE = ALGOS["CRRAFT"]
RUN = jax.jit(lambda config, g: OBJECTIVE.advantages(config, g, OBJECTIVE.shape(config, g), ())[0])


def test_the_best_feasible_answer_near_the_reference_is_imitated_by_its_calibrated_reward():
    # Of the first prompt the second row: sigmoid(1.5 - 0.5) = 0.73106; the third is 12 nats from the reference, the
    # fourth is not feasible. Of the second no sample was judged: its greedy answer, feasible, sigmoid(0) = 0.5. The
    # third has a sample and no baseline.
    found = RUN(CRRAFT(), groups())
    a, b = 0.73106, 0.5
    np.testing.assert_allclose(found, [[0, 0], [a, a], [0, 0], [0, 0], [b, b], *[[0, 0]] * 4], atol=1e-5)
    np.testing.assert_array_equal(OBJECTIVE.keep(CRRAFT(), groups()), np.asarray(found)[:, 0] > 0)


def test_nothing_is_imitated_where_the_greedy_answer_is_not_feasible_either():
    none = groups(feasible=jnp.zeros(9, bool))
    np.testing.assert_array_equal(RUN(CRRAFT(), none), 0)
    assert not OBJECTIVE.keep(CRRAFT(), none).any()
    # Nothing is near enough: the greedy answer of the second prompt alone.
    far = groups(old_logprobs=jnp.full((9, 2), 9.0))
    np.testing.assert_allclose(RUN(CRRAFT(), far)[:, 0], [0, 0, 0, 0, 0.5, 0, 0, 0, 0])


def test_of_rows_that_tie_for_the_best_the_first_is_imitated():
    equal = groups(reward=jnp.array([0.5, 0.5, 0.5, 0.5, 0.0, NAN, 9.0, NAN, 1.0]), feasible=None)
    found = RUN(CRRAFT(kl_limit=24.0), equal)[:, 0]
    np.testing.assert_allclose(found[:4], [0, 0.5, 0, 0], rtol=1e-6)


def test_the_loss_is_the_weighted_likelihood():
    # 0.73106 on log-probs -1 and -2: 0.73106, 1.46212; gradient -0.73106 each.
    loss, _, gradient = loss_of(OBJECTIVE, CRRAFT(), tokens([-1.0, -2.0], [-1.0, -2.0], [0.73106] * 2))
    np.testing.assert_allclose(loss, [0.73106, 1.46212], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.73106, -0.73106], rtol=1e-6)


def test_what_it_needs_and_refuses():
    needs = OBJECTIVE.needs(CRRAFT())
    assert needs.reference and needs.credit_logprobs and needs.greedy_sample
    OBJECTIVE.check(CRRAFT(), FACTS)
    with pytest.raises(ValueError, match=r"CRRAFT\.kl_limit = 0\.0 must be above 0"):
        OBJECTIVE.check(CRRAFT(kl_limit=0.0), FACTS)
    with pytest.raises(ValueError, match=r"CRRAFT reads which rows fail"):
        OBJECTIVE.check(CRRAFT(), FACTS._replace(replaces_infeasible=True))
