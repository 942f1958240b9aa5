from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_crpg import FACTS, groups
from test_pair_objectives import MEANS, RUNNING

from jrl.algos import ALGOS
from jrl.algos.codpo import CODPO

OBJECTIVE = ALGOS["CODPO"]


def test_a_feasible_answer_is_preferred_to_an_infeasible_one():
    # First prompt: feasible 1.5 and 0.5, infeasible 0.5 and 1.5: the second row over the first. The others have one.
    found = jax.jit(lambda g: OBJECTIVE.pairs(CODPO(), g, g.reward))(groups())
    np.testing.assert_array_equal(found.label, [0, 1, *[0] * 7])
    np.testing.assert_array_equal(found.unit, [0, 0, *[-1] * 7])
    np.testing.assert_array_equal(found.weight, 1)
    # Without constraints the best over the worst: of equal rewards the first ones.
    found = OBJECTIVE.pairs(CODPO(), groups(feasible=None), groups().reward)
    np.testing.assert_array_equal(found.label, [0, 1, *[0] * 7])
    none = OBJECTIVE.pairs(CODPO(), groups(feasible=jnp.zeros(9, bool)), groups().reward)
    np.testing.assert_array_equal(none.unit, -1)


def test_the_loss_is_dpos_with_the_likelihood_of_the_preferred_answer():
    # D = 2, beta 0.1: log(1 + e^-0.2) = 0.598139; log-prob -10 over 10 tokens: 0.5 * 1.
    for pairs in (RUNNING, MEANS):
        plain = ALGOS["DPO"].sequence_loss(ALGOS["DPO"].config(), pairs, ())[0]
        mean = pairs.logprob[0, 0] / pairs.length[0, 0]
        found = jax.jit(OBJECTIVE.sequence_loss)(CODPO(weight=0.5), pairs, ())[0]
        np.testing.assert_allclose(found, plain - 0.5 * jnp.array([[mean, 0]]), rtol=1e-6)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64) if x.dtype == jnp.float32 else x, RUNNING)
        total = lambda lp: OBJECTIVE.sequence_loss(CODPO(), dataclasses.replace(wide, logprob=lp), ())[0].sum()
        step = 1e-5 * jnp.eye(2)[:, None]
        expected = [(total(wide.logprob + d) - total(wide.logprob - d)) / 2e-5 for d in step]
        np.testing.assert_allclose(jax.grad(total)(wide.logprob)[0], expected, 1e-6, 1e-9)


def test_what_it_refuses():
    OBJECTIVE.check(CODPO(), FACTS)
    with pytest.raises(ValueError, match=r"CODPO\.weight = 0\.0 must be above 0"):
        OBJECTIVE.check(CODPO(weight=0.0), FACTS)
    with pytest.raises(ValueError, match=r"CODPO\.beta = 0\.0 must be above 0"):
        OBJECTIVE.check(CODPO(beta=0.0), FACTS)
    with pytest.raises(ValueError, match=r"CODPO reads which rows fail"):
        OBJECTIVE.check(CODPO(), FACTS._replace(replaces_infeasible=True))
