from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.common import TruncatedImportance
from jrl.algos.contract import Facts, Groups, Tokens
from jrl.algos.reinforce_plus_plus import ReinforcePlusPlus

OBJECTIVE = ALGOS["ReinforcePlusPlus"]
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


def test_returns_are_whitened_over_the_tokens_of_the_batch():
    # Tokens of rewards 1 (1 and 2 of them) and 0 (3, 1, 2): mean 3/9, var1 = (3 * 4/9 + 6 * 1/9) / 8 = 1/4.
    expected = np.array([2 / 3, 2 / 3, -1 / 3, -1 / 3, -1 / 3, 0, 0]) / 0.5
    np.testing.assert_allclose(credited(ReinforcePlusPlus(), groups()), expected, rtol=1e-5)


def test_the_kl_in_the_reward_counts_for_the_tokens_before_it():
    # Row 0 is 0.5 nats from the reference on its one token: 0.1 * 0.5 less. Row 1 on its second: both its returns.
    given = groups()
    distance = jnp.zeros((7, 3)).at[0, 0].set(0.5).at[1, 1].set(0.5)
    given = given.replace(old_logprobs=distance - 1, ref_logprobs=jnp.full((7, 3), -1.0))
    config = ReinforcePlusPlus(kl_in_reward=0.1)
    each = np.array([0.95, 0.95, 0.95, 0, 0, 0, 0, 0, 0])
    expected = (np.array([0.95, 0.95, 0, 0, 0]) - each.mean()) / each.std(ddof=1)
    np.testing.assert_allclose(credited(config, given), np.append(expected, [0, 0]), rtol=1e-5)
    needs = OBJECTIVE.needs(config)
    assert needs.reference and needs.credit_logprobs and not OBJECTIVE.needs(ReinforcePlusPlus()).reference


def test_the_discount_is_by_token():
    # discount 0.5: returns 1 | 0.5, 1 | 0 six times: mean 2.5 / 9, so that row 1 has A_0 < A_1 = A of row 0.
    given = groups()
    found, _, _ = OBJECTIVE.advantages(ReinforcePlusPlus(discount=0.5), given, given.reward, ())
    returns = np.array([1, 0.5, 1, 0, 0, 0, 0, 0, 0])
    deviation = np.std(returns, ddof=1)
    np.testing.assert_allclose(found[1, :2], (np.array([0.5, 1]) - returns.mean()) / deviation, rtol=1e-5)
    np.testing.assert_allclose(found[0, 0], found[1, 1], rtol=1e-6)


def test_tokens_weigh_alike():
    mask = jnp.array([[True, False, False], [True, True, True], [False] * 3])
    np.testing.assert_array_equal(OBJECTIVE.weights(ReinforcePlusPlus(), mask, 3), mask)
    assert OBJECTIVE.denominator(ReinforcePlusPlus(), mask, 3, 3) == 4


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
    loss, metrics = jax.jit(OBJECTIVE.token_loss)(ReinforcePlusPlus(), tokens(), ())
    np.testing.assert_allclose(loss, [-1.2, 1.6, 0], rtol=1e-6)
    np.testing.assert_array_equal(metrics["clip_fraction_high"], [1, 0, 0])
    np.testing.assert_array_equal(metrics["clip_fraction_low"], [0, 1, 0])
    config = ReinforcePlusPlus(importance=TruncatedImportance(), entropy_bonus=0.1)
    np.testing.assert_allclose(OBJECTIVE.token_loss(config, tokens(), ())[0], [-2.6, 3.0, 0], rtol=1e-6)
    gradient = jax.grad(
        lambda lp: OBJECTIVE.token_loss(ReinforcePlusPlus(), tokens().replace(logprobs=lp), ())[0].sum()
    )
    # Both are clipped; within the bounds the gradient is -A rho.
    np.testing.assert_array_equal(gradient(tokens().logprobs), [0, 0, 0])
    np.testing.assert_allclose(gradient(jnp.log(jnp.array([1.1, 0.9, 1.0]))), [-1.1, 1.8, 0], rtol=1e-6)


def test_one_sample_of_a_prompt_is_enough():
    OBJECTIVE.check(ReinforcePlusPlus(), FACTS._replace(samples=1))


@pytest.mark.parametrize(
    "config, facts, message",
    [
        (ReinforcePlusPlus(clip_low=1.5), FACTS, r"ReinforcePlusPlus\.clip_low = 1\.5"),
        (ReinforcePlusPlus(clip_high=-0.1), FACTS, r"ReinforcePlusPlus\.clip_high = -0\.1"),
        (ReinforcePlusPlus(dual_clip=1.0), FACTS, r"ReinforcePlusPlus\.dual_clip = 1\.0"),
        (ReinforcePlusPlus(kl_in_reward=0.0), FACTS, r"ReinforcePlusPlus\.kl_in_reward = 0\.0"),
        (ReinforcePlusPlus(discount=0.0), FACTS, r"ReinforcePlusPlus\.discount = 0\.0"),
        (ReinforcePlusPlus(discount=1.5), FACTS, r"ReinforcePlusPlus\.discount = 1\.5"),
    ],
)
def test_illegal_combinations_are_refused(config, facts, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, facts)
