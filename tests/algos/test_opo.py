from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from small_batches import credited, two_prompts

from jrl.algos import ALGOS
from jrl.algos.opo import OPO

OBJECTIVE = ALGOS["OPO"]


def test_the_baseline_is_weighted_by_length():
    # Group 0: lengths 1, 3, 2 of rewards 1, 0, 0: b = 1 / 6. Group 1: lengths 2, 1 of 1, 0: b = 2 / 3.
    expected = [5 / 6, 1 / 3, -1 / 6, -2 / 3, -1 / 6, 0, 0]
    np.testing.assert_allclose(credited(OBJECTIVE, OPO(), two_prompts()), expected, rtol=1e-5)


def test_tokens_weigh_alike():
    mask = jnp.array([[True, False, False], [True, True, True], [False] * 3])
    np.testing.assert_array_equal(OBJECTIVE.weights(OPO(), mask, 3), mask)
    assert OBJECTIVE.denominator(OPO(), mask, 3, 3) == 4
