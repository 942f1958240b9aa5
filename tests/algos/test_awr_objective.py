from __future__ import annotations

import jax
import numpy as np
import pytest
from small_batches import groups_of, loss_of, tokens

from jrl.algos import ALGOS
from jrl.algos.awr import AWR
from jrl.algos.contract import Facts

OBJECTIVE = ALGOS["AWR"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=2)


def test_weights_grow_exponentially_with_the_advantage_and_are_cut():
    # A = +-0.70711 in group 0: exp(0.70711 / 0.5) = 4.1133, cut to 3, and exp(-0.70711 / 0.5) = 0.24312. Group 1 is
    # all equal and left out; row 4 has no verdict.
    rows = groups_of([1, 0, 1, 1, float("nan")], [0, 0, 1, 1, 0], valid=[True] * 4 + [False])
    config = AWR(beta=0.5, max_weight=3.0)
    found = jax.jit(lambda g: OBJECTIVE.advantages(config, g, g.reward, ())[0])(rows)
    np.testing.assert_allclose(found[:, 1], [3, np.exp(-np.sqrt(0.5) / 0.5), 1, 1, 0], rtol=1e-5)
    np.testing.assert_array_equal(found[:, 0], np.zeros(5))
    np.testing.assert_array_equal(OBJECTIVE.keep(config, rows), [1, 1, 0, 0, 0])
    np.testing.assert_array_equal(OBJECTIVE.keep(AWR(drop_equal_groups=False), rows), [1, 1, 1, 1, 0])


def test_the_loss_is_weighted_imitation_whatever_the_ratio():
    loss, _, gradient = loss_of(OBJECTIVE, AWR(), tokens([-1.0, -2.0], [-3.0, 0.0], [2.0, 0.5]))
    np.testing.assert_allclose(loss, [2, 1], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-2, -0.5], rtol=1e-6)


@pytest.mark.parametrize("bad", [{"beta": 0.0}, {"max_weight": 0.5}, {"entropy_bonus": -1.0}], ids=str)
def test_illegal_values_are_refused(bad):
    ((field, value),) = bad.items()
    with pytest.raises(ValueError, match=rf"AWR\.{field} = {value}"):
        OBJECTIVE.check(AWR(**bad), FACTS)
