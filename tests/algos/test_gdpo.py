from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import credited, two_prompts

from jrl.algos import ALGOS
from jrl.algos.contract import Facts
from jrl.algos.gdpo import GDPO

OBJECTIVE = ALGOS["GDPO"]
FACTS = Facts(samples=8, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def scored(second):
    """Returns the groups with the reward as one component and another one."""
    return two_prompts().replace(components={"exact": two_prompts().reward, "format": jnp.array(second)})


SAME = [1.0, 1.0, 1.0, 1.0, 1.0, jnp.nan, 9.0]


def test_components_are_compared_in_their_own_deviations_and_whitened():
    # Exact in group 0: std1 of 1, 0, 0 is 0.577350: 1.154699, -0.577349; in group 1: +-0.707106. The format is equal in
    # all rows and adds 0. Rows have 1, 2, 3, 1 and 2 tokens.
    z = np.array([1.154699, 0.707106, -0.577349, -0.707106, -0.577349])
    each = np.repeat(z, [1, 2, 3, 1, 2])
    expected = np.append((z - each.mean()) / np.sqrt(each.var(ddof=1) + 1e-8), [0, 0])
    np.testing.assert_allclose(credited(OBJECTIVE, GDPO(), scored(SAME)), expected, rtol=1e-5)
    # A component that differs: the exact one reversed takes all of it away at weight 1, up to a rounding that
    # whitening makes larger, and half of it at 0.5.
    against = scored([0.0, 0.0, 1.0, 1.0, 1.0, jnp.nan, 9.0])
    np.testing.assert_allclose(credited(OBJECTIVE, GDPO(), against), np.zeros(7), atol=1e-3)
    np.testing.assert_allclose(credited(OBJECTIVE, GDPO(weights=(1.0, 0.5)), against), expected, rtol=1e-5)
    np.testing.assert_allclose(credited(OBJECTIVE, GDPO(weights=(0.5, 1.0)), against), -expected, rtol=1e-5)


def test_a_verifier_that_does_not_apply_to_a_row_leaves_its_other_components():
    partly = scored([jnp.nan, 1.0, 1.0, 1.0, 1.0, jnp.nan, 9.0])
    np.testing.assert_allclose(
        credited(OBJECTIVE, GDPO(), partly), credited(OBJECTIVE, GDPO(), scored(SAME)), rtol=1e-6
    )


def test_components_and_weights_have_one_length():
    with pytest.raises(ValueError, match=r"3 numbers and the reward 2 components \(exact, format\)"):
        credited(OBJECTIVE, GDPO(weights=(1.0, 1.0, 1.0)), scored(SAME))
    with pytest.raises(ValueError, match="the reward 0 components"):
        credited(OBJECTIVE, GDPO(), two_prompts())


def test_tokens_weigh_alike():
    mask = jnp.array([[True, False, False], [True, True, True], [False] * 3])
    np.testing.assert_array_equal(OBJECTIVE.weights(GDPO(), mask, 3), mask)
    assert OBJECTIVE.denominator(GDPO(), mask, 3, 3) == 4


@pytest.mark.parametrize(
    "config, facts, message",
    [
        (GDPO(weights=(0.0, 0.0)), FACTS, r"GDPO\.weights = \(0\.0, 0\.0\)"),
    ],
)
def test_illegal_combinations_are_refused(config, facts, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, facts)
