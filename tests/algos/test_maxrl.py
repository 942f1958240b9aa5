from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from small_batches import credited, two_prompts

from jrl.algos import ALGOS
from jrl.algos.maxrl import MaxRL

OBJECTIVE = ALGOS["MaxRL"]


def test_rewards_are_relative_to_the_mean_of_their_group():
    # Group 0 has mean 1/3: (1 - 1/3) / (1/3) = 2, -1, -1. Group 1 has mean 1/2: +-1.
    np.testing.assert_allclose(credited(OBJECTIVE, MaxRL(), two_prompts()), [2, 1, -1, -1, -1, 0, 0], rtol=1e-5)


def test_tokens_weigh_alike():
    mask = jnp.array([[True, False, False], [True, True, True], [False] * 3])
    np.testing.assert_array_equal(OBJECTIVE.weights(MaxRL(), mask, 3), mask)
    assert OBJECTIVE.denominator(MaxRL(), mask, 3, 3) == 4
