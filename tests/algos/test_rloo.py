from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from small_batches import credited, two_prompts

from jrl.algos import ALGOS
from jrl.algos.rloo import RLOO

OBJECTIVE = ALGOS["RLOO"]


def test_each_row_is_compared_with_the_others():
    # Group 0 has rewards 1, 0, 0: 1 - 0, 0 - 1/2, 0 - 1/2. Group 1 has 1 and 0 left: +-1.
    np.testing.assert_allclose(credited(OBJECTIVE, RLOO(), two_prompts()), [1, 1, -0.5, -1, -0.5, 0, 0], rtol=1e-6)


def test_sequences_weigh_alike_and_their_tokens_are_summed():
    mask = jnp.array([[True, False, False], [True, True, True], [False] * 3])
    np.testing.assert_array_equal(OBJECTIVE.weights(RLOO(), mask, 3), mask)
    assert OBJECTIVE.denominator(RLOO(), mask, 3, 3) == 2
