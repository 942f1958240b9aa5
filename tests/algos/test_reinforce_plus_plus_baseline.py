from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import clipped_tokens, credited, two_prompts

from jrl.algos import ALGOS
from jrl.algos.contract import Facts
from jrl.algos.reinforce_plus_plus_baseline import ReinforcePlusPlusBaseline

OBJECTIVE = ALGOS["ReinforcePlusPlusBaseline"]
FACTS = Facts(samples=8, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_rewards_are_centered_by_group_and_whitened_over_tokens():
    # Centered: 2/3 (1 token), 1/2 (2), -1/3 (3), -1/2 (1), -1/3 (2): sum -1/2 over 9 tokens.
    centered = np.array([2 / 3, 1 / 2, -1 / 3, -1 / 2, -1 / 3])
    each = np.repeat(centered, [1, 2, 3, 1, 2])
    expected = np.append((centered - each.mean()) / np.sqrt(each.var(ddof=1) + 1e-8), [0, 0])
    np.testing.assert_allclose(credited(OBJECTIVE, ReinforcePlusPlusBaseline(), two_prompts()), expected, rtol=1e-5)


def test_tokens_weigh_alike():
    mask = jnp.array([[True, False, False], [True, True, True], [False] * 3])
    np.testing.assert_array_equal(OBJECTIVE.weights(ReinforcePlusPlusBaseline(), mask, 3), mask)
    assert OBJECTIVE.denominator(ReinforcePlusPlusBaseline(), mask, 3, 3) == 4


def test_the_kl_pulls_by_the_distance_to_the_reference():
    # k2 is d^2 / 2, its gradient d: with lp = ref + 0.5, 0.1 * 0.125 and 0.1 * 0.5. None needs no reference.
    given = clipped_tokens().replace(
        advantages=jnp.zeros(3), ref_logprobs=clipped_tokens().logprobs - jnp.array([0.5, -0.5, 9.0])
    )
    total = lambda lp, config: OBJECTIVE.token_loss(config, given.replace(logprobs=lp), ())[0]
    config = ReinforcePlusPlusBaseline(kl=0.1)
    np.testing.assert_allclose(total(given.logprobs, config), [0.0125, 0.0125, 0], rtol=1e-5)
    gradient = jax.grad(lambda lp: total(lp, config).sum())(given.logprobs)
    np.testing.assert_allclose(gradient, [0.05, -0.05, 0], rtol=1e-5)
    assert OBJECTIVE.needs(ReinforcePlusPlusBaseline()).reference
    assert not OBJECTIVE.needs(ReinforcePlusPlusBaseline(kl=None)).reference


@pytest.mark.parametrize(
    "config, facts, message",
    [
        (ReinforcePlusPlusBaseline(kl=0.0), FACTS, r"Baseline\.kl = 0\.0 must be above 0, or None"),
    ],
)
def test_illegal_combinations_are_refused(config, facts, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, facts)
