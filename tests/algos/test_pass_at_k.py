from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import credited, two_prompts

from jrl.algos import ALGOS
from jrl.algos.contract import Facts
from jrl.algos.pass_at_k import PassAtK

OBJECTIVE = ALGOS["PassAtK"]
FACTS = Facts(samples=8, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_credit_is_that_of_the_best_of_k_without_the_bias_of_the_mean():
    # k = 2. Group 0, n = 3, c = 1: right 2/3, wrong 2/3 (1 - C(1, 1) / C(2, 1)) = 1/3, mean 4/9; times
    # 9 / (3 - 2): 2, -1. Group 1 has n = 2: any two rows hold the right one.
    np.testing.assert_allclose(credited(OBJECTIVE, PassAtK(k=2), two_prompts()), [2, 0, -1, 0, -1, 0, 0], rtol=1e-5)


def test_with_k_1_it_is_rloo():
    rloo, _, _ = ALGOS["RLOO"].advantages(ALGOS["RLOO"].config(), two_prompts(), two_prompts().reward, ())
    np.testing.assert_allclose(credited(OBJECTIVE, PassAtK(k=1), two_prompts()), rloo[:, 0], rtol=1e-5)


def test_a_row_is_right_above_the_threshold():
    given = two_prompts().replace(reward=two_prompts().reward * 0.4)
    np.testing.assert_array_equal(credited(OBJECTIVE, PassAtK(k=1), given), np.zeros(7))
    found = credited(OBJECTIVE, PassAtK(k=1, threshold=0.3), given)
    np.testing.assert_allclose(found, credited(OBJECTIVE, PassAtK(k=1), two_prompts()), rtol=1e-6)


def test_sequences_weigh_alike_and_their_tokens_are_summed():
    mask = jnp.array([[True, False, False], [True, True, True], [False] * 3])
    np.testing.assert_array_equal(OBJECTIVE.weights(PassAtK(), mask, 3), mask)
    assert OBJECTIVE.denominator(PassAtK(), mask, 3, 3) == 2


@pytest.mark.parametrize(
    "config, facts, message",
    [
        (PassAtK(k=0), FACTS, r"PassAtK\.k = 0 must be 1 to 7"),
        (PassAtK(k=8), FACTS, r"PassAtK\.k = 8 must be 1 to 7"),
    ],
)
def test_illegal_combinations_are_refused(config, facts, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, facts)
