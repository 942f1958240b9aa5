from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from small_batches import credited, two_prompts

from jrl.algos import ALGOS
from jrl.algos.lite_ppo import LitePPO

OBJECTIVE = ALGOS["LitePPO"]


def test_rewards_are_centered_by_group_and_divided_by_the_deviation_of_the_batch():
    # Rewards 1, 0, 0 | 1, 0: mean 0.4, var1 = (2 * 0.36 + 3 * 0.16) / 4 = 0.3, std 0.547723. Group 0 has mean 1/3.
    expected = np.array([2 / 3, 0.5, -1 / 3, -0.5, -1 / 3, 0, 0]) / 0.547724
    np.testing.assert_allclose(credited(OBJECTIVE, LitePPO(), two_prompts()), expected, rtol=1e-5)


def test_tokens_weigh_alike():
    mask = jnp.array([[True, False, False], [True, True, True], [False] * 3])
    np.testing.assert_array_equal(OBJECTIVE.weights(LitePPO(), mask, 3), mask)
    assert OBJECTIVE.denominator(LitePPO(), mask, 3, 3) == 4
