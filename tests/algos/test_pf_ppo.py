from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import groups_of

from jrl.algos import ALGOS, common, ppo
from jrl.algos.contract import Facts
from jrl.algos.pf_ppo import PFPPO

OBJECTIVE = ALGOS["PFPPO"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=2)


def given():
    rows = groups_of([0.2, 0.9, 0.5, 0.1, 0.3, 7.0], [0, 0, 0, 0, 1, 1], valid=[True] * 5 + [False])
    values = jnp.full((6, 3), 0.25).at[5].set(jnp.nan)
    return rows.replace(sample=jnp.array([0, 1, 2, 3, 0, 1], jnp.int32), values=values)


@pytest.mark.parametrize("strategy, kept", [("best", [1, 4]), ("best_and_worst", [1, 3, 4]), ("best_and_random", None)])
def test_rows_are_kept_by_the_rank_of_their_reward(strategy, kept):
    found = np.flatnonzero(jax.jit(lambda g: OBJECTIVE.keep(PFPPO(strategy=strategy), g))(given()))
    if kept is None:  # the best, and of rows 0, 2 and 3 the one of the highest draw
        draws = np.asarray(common.row_draws(given()))
        kept = sorted([1, max((0, 2, 3), key=lambda row: draws[row]), 4])
    np.testing.assert_array_equal(found, kept)


def test_draws_of_rows_differ_and_lie_in_the_unit_interval():
    draws = np.asarray(common.row_draws(given()))
    assert len(set(draws)) == 6 and (0 <= draws).all() and (draws < 1).all()


def test_advantages_and_returns_are_those_of_ppo_on_the_kept_rows_alone():
    rows = given()
    found = OBJECTIVE.advantages(PFPPO(), rows, rows.reward, ())[0]
    chosen = jnp.array([1, 3, 4])
    alone = jax.tree.map(lambda x: x[chosen], rows)
    np.testing.assert_allclose(found[chosen], ppo.advantages(PFPPO(), alone, alone.reward, ())[0], rtol=1e-6)
    np.testing.assert_array_equal(found[jnp.array([0, 2, 5])], np.zeros((3, 3)))
    returns = OBJECTIVE.returns(PFPPO(gae_lambda=1.0), rows, rows.reward)
    np.testing.assert_allclose(returns[chosen, 1:], [[0.9, 0.9], [0.1, 0.1], [0.3, 0.3]], rtol=1e-6)


def test_illegal_values_are_refused():
    with pytest.raises(ValueError, match=r"PFPPO\.strategy = 'worst'"):
        OBJECTIVE.check(PFPPO(strategy="worst"), FACTS)
    with pytest.raises(ValueError, match="PFPPO compares the samples of one prompt"):
        OBJECTIVE.check(PFPPO(), FACTS._replace(samples=1))
