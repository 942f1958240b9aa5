from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import credited, two_prompts

from jrl.algos import ALGOS
from jrl.algos.contract import Facts
from jrl.algos.reinforce_plus_plus import ReinforcePlusPlus

OBJECTIVE = ALGOS["ReinforcePlusPlus"]
FACTS = Facts(samples=8, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_returns_are_whitened_over_the_tokens_of_the_batch():
    # Tokens of rewards 1 (1 and 2 of them) and 0 (3, 1, 2): mean 3/9, var1 = (3 * 4/9 + 6 * 1/9) / 8 = 1/4.
    expected = np.array([2 / 3, 2 / 3, -1 / 3, -1 / 3, -1 / 3, 0, 0]) / 0.5
    np.testing.assert_allclose(credited(OBJECTIVE, ReinforcePlusPlus(), two_prompts()), expected, rtol=1e-5)


def test_the_kl_in_the_reward_counts_for_the_tokens_before_it():
    # Row 0 is 0.5 nats from the reference on its one token: 0.1 * 0.5 less. Row 1 on its second: both its returns.
    given = two_prompts()
    distance = jnp.zeros((7, 3)).at[0, 0].set(0.5).at[1, 1].set(0.5)
    given = given.replace(old_logprobs=distance - 1, ref_logprobs=jnp.full((7, 3), -1.0))
    config = ReinforcePlusPlus(kl_in_reward=0.1)
    each = np.array([0.95, 0.95, 0.95, 0, 0, 0, 0, 0, 0])
    expected = (np.array([0.95, 0.95, 0, 0, 0]) - each.mean()) / each.std(ddof=1)
    np.testing.assert_allclose(credited(OBJECTIVE, config, given), np.append(expected, [0, 0]), rtol=1e-5)
    needs = OBJECTIVE.needs(config)
    assert needs.reference and needs.credit_logprobs and not OBJECTIVE.needs(ReinforcePlusPlus()).reference


def test_the_discount_is_by_token():
    # discount 0.5: returns 1 | 0.5, 1 | 0 six times: mean 2.5 / 9, so that row 1 has A_0 < A_1 = A of row 0.
    given = two_prompts()
    found, _, _ = OBJECTIVE.advantages(ReinforcePlusPlus(discount=0.5), given, given.reward, ())
    returns = np.array([1, 0.5, 1, 0, 0, 0, 0, 0, 0])
    deviation = np.std(returns, ddof=1)
    np.testing.assert_allclose(found[1, :2], (np.array([0.5, 1]) - returns.mean()) / deviation, rtol=1e-5)
    np.testing.assert_allclose(found[0, 0], found[1, 1], rtol=1e-6)


def test_tokens_weigh_alike():
    mask = jnp.array([[True, False, False], [True, True, True], [False] * 3])
    np.testing.assert_array_equal(OBJECTIVE.weights(ReinforcePlusPlus(), mask, 3), mask)
    assert OBJECTIVE.denominator(ReinforcePlusPlus(), mask, 3, 3) == 4


def test_one_sample_of_a_prompt_is_enough():
    OBJECTIVE.check(ReinforcePlusPlus(), FACTS._replace(samples=1))


@pytest.mark.parametrize(
    "config, facts, message",
    [
        (ReinforcePlusPlus(kl_in_reward=0.0), FACTS, r"ReinforcePlusPlus\.kl_in_reward = 0\.0"),
        (ReinforcePlusPlus(discount=0.0), FACTS, r"ReinforcePlusPlus\.discount = 0\.0"),
        (ReinforcePlusPlus(discount=1.5), FACTS, r"ReinforcePlusPlus\.discount = 1\.5"),
    ],
)
def test_illegal_combinations_are_refused(config, facts, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, facts)
