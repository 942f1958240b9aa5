from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.common import TruncatedImportance
from jrl.algos.contract import Facts, Groups, Tokens
from jrl.algos.lite_ppo import LitePPO

OBJECTIVE = ALGOS["LitePPO"]
FACTS = Facts(samples=8, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def groups():
    """Two prompts of three rows, in turns; one row of the second has no verdict, and a row no token."""
    reward = jnp.array([1.0, 1.0, 0.0, 0.0, 0.0, jnp.nan, 9.0])
    return Groups(
        reward=reward,
        outcome=reward,
        valid=~jnp.isnan(reward),
        group=jnp.array([0, 1, 0, 1, 0, 1, 0], jnp.int32),
        action_mask=jnp.arange(3)[None, :] < jnp.array([1, 2, 3, 1, 2, 3, 0])[:, None],
        finish=jnp.zeros(7, jnp.int8),
        num_groups=2,
        max_completion=3,
    )


def credited(config, given):
    """Returns advantages on every row's first token, after checking that its other sampled tokens have the same."""
    run = jax.jit(lambda config, g: OBJECTIVE.advantages(config, g, OBJECTIVE.shape(config, g), ()))
    found, state, counters = run(config, given)
    assert state == ()
    assert {name: int(counters[name]) for name in ("unscorable", "aborted")} == {"unscorable": 1, "aborted": 1}
    np.testing.assert_array_equal(found, jnp.where(given.action_mask, found[:, :1], 0))
    return found[:, 0]


def test_rewards_are_centered_by_group_and_divided_by_the_deviation_of_the_batch():
    # Rewards 1, 0, 0 | 1, 0: mean 0.4, var1 = (2 * 0.36 + 3 * 0.16) / 4 = 0.3, std 0.547723. Group 0 has mean 1/3.
    expected = np.array([2 / 3, 0.5, -1 / 3, -0.5, -1 / 3, 0, 0]) / 0.547724
    np.testing.assert_allclose(credited(LitePPO(), groups()), expected, rtol=1e-5)


def test_tokens_weigh_alike():
    mask = jnp.array([[True, False, False], [True, True, True], [False] * 3])
    np.testing.assert_array_equal(OBJECTIVE.weights(LitePPO(), mask, 3), mask)
    assert OBJECTIVE.denominator(LitePPO(), mask, 3, 3) == 4


def tokens():
    return Tokens(
        logprobs=jnp.log(jnp.array([1.5, 0.5, 1.0])),
        old_logprobs=jnp.zeros(3),
        behaviour_logprobs=jnp.full(3, -np.log(2.0), jnp.float32),
        ref_logprobs=None,
        entropy=jnp.full(3, 2.0),
        advantages=jnp.array([1.0, -2.0, 3.0]),
        mask=jnp.array([True, True, False]),
        segment=jnp.zeros(3, jnp.int32),
        num_segments=1,
    )


def test_the_loss_is_the_clip():
    # rho 1.5, A 1: -1.2; rho 0.5, A -2: 1.6; the entropy 0.1 * 2 less; w = 2 doubles the clip alone
    loss, metrics = jax.jit(OBJECTIVE.token_loss)(LitePPO(), tokens(), ())
    np.testing.assert_allclose(loss, [-1.2, 1.6, 0], rtol=1e-6)
    np.testing.assert_array_equal(metrics["clip_fraction_high"], [1, 0, 0])
    np.testing.assert_array_equal(metrics["clip_fraction_low"], [0, 1, 0])
    config = LitePPO(importance=TruncatedImportance(), entropy_bonus=0.1)
    np.testing.assert_allclose(OBJECTIVE.token_loss(config, tokens(), ())[0], [-2.6, 3.0, 0], rtol=1e-6)
    gradient = jax.grad(lambda lp: OBJECTIVE.token_loss(LitePPO(), tokens().replace(logprobs=lp), ())[0].sum())
    # Both are clipped; within the bounds the gradient is -A rho.
    np.testing.assert_array_equal(gradient(tokens().logprobs), [0, 0, 0])
    np.testing.assert_allclose(gradient(jnp.log(jnp.array([1.1, 0.9, 1.0]))), [-1.1, 1.8, 0], rtol=1e-6)


@pytest.mark.parametrize(
    "config, facts, message",
    [
        (LitePPO(), FACTS._replace(samples=1), "LitePPO compares the samples of one prompt"),
        (LitePPO(clip_low=1.5), FACTS, r"LitePPO\.clip_low = 1\.5"),
        (LitePPO(clip_high=-0.1), FACTS, r"LitePPO\.clip_high = -0\.1"),
        (LitePPO(dual_clip=1.0), FACTS, r"LitePPO\.dual_clip = 1\.0"),
    ],
)
def test_illegal_combinations_are_refused(config, facts, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, facts)
