from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import groups_of

from jrl.algos import ALGOS
from jrl.algos.contract import Facts
from jrl.algos.remax import ReMax

OBJECTIVE = ALGOS["ReMax"]
FACTS = Facts(samples=1, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=2)


def test_rewards_are_compared_with_the_greedy_answer_which_is_not_learned_from():
    # Prompt 0: greedy 1, so that [1, 0] get [0, -1]. Prompt 1: greedy 0, a right sample gets 1. Prompt 2: the greedy
    # answer has no verdict, and nothing is learned.
    nan = float("nan")
    given = groups_of([1, 1, 0, 0, 1, nan, 1], [0, 0, 0, 1, 1, 2, 2], valid=[True] * 5 + [False, True])
    given = given.replace(sample=jnp.array([0, 1, 2, 0, 1, 0, 1], jnp.int32))
    found, state, counters = jax.jit(lambda g: OBJECTIVE.advantages(ReMax(), g, g.reward, ()))(given)
    np.testing.assert_array_equal(found[:, 1], [0, 0, -1, 0, 1, 0, 0])
    np.testing.assert_array_equal(found[:, 0], np.zeros(7))
    np.testing.assert_array_equal(OBJECTIVE.keep(ReMax(), given), [False, True, True, False, True, False, False])
    assert state == () and counters["unscorable"] == 1


def test_it_asks_for_a_greedy_answer_and_a_sample_beside_it():
    assert OBJECTIVE.needs(ReMax()).greedy_sample
    with pytest.raises(ValueError, match="ReMax compares the samples of one prompt"):
        OBJECTIVE.check(ReMax(), FACTS)
