from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.common import TruncatedImportance
from jrl.algos.contract import Facts, Groups, Tokens
from jrl.algos.reinforce_plus_plus_baseline import ReinforcePlusPlusBaseline

OBJECTIVE = ALGOS["ReinforcePlusPlusBaseline"]
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


def test_rewards_are_centered_by_group_and_whitened_over_tokens():
    # Centered: 2/3 (1 token), 1/2 (2), -1/3 (3), -1/2 (1), -1/3 (2): sum -1/2 over 9 tokens.
    centered = np.array([2 / 3, 1 / 2, -1 / 3, -1 / 2, -1 / 3])
    each = np.repeat(centered, [1, 2, 3, 1, 2])
    expected = np.append((centered - each.mean()) / np.sqrt(each.var(ddof=1) + 1e-8), [0, 0])
    np.testing.assert_allclose(credited(ReinforcePlusPlusBaseline(), groups()), expected, rtol=1e-5)


def test_tokens_weigh_alike():
    mask = jnp.array([[True, False, False], [True, True, True], [False] * 3])
    np.testing.assert_array_equal(OBJECTIVE.weights(ReinforcePlusPlusBaseline(), mask, 3), mask)
    assert OBJECTIVE.denominator(ReinforcePlusPlusBaseline(), mask, 3, 3) == 4


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
    plain = ReinforcePlusPlusBaseline(kl=None)
    loss, metrics = jax.jit(OBJECTIVE.token_loss)(plain, tokens(), ())
    np.testing.assert_allclose(loss, [-1.2, 1.6, 0], rtol=1e-6)
    np.testing.assert_array_equal(metrics["clip_fraction_high"], [1, 0, 0])
    np.testing.assert_array_equal(metrics["clip_fraction_low"], [0, 1, 0])
    config = ReinforcePlusPlusBaseline(kl=None, importance=TruncatedImportance(), entropy_bonus=0.1)
    np.testing.assert_allclose(OBJECTIVE.token_loss(config, tokens(), ())[0], [-2.6, 3.0, 0], rtol=1e-6)
    gradient = jax.grad(
        lambda lp: OBJECTIVE.token_loss(ReinforcePlusPlusBaseline(kl=None), tokens().replace(logprobs=lp), ())[0].sum()
    )
    # Both are clipped; within the bounds the gradient is -A rho.
    np.testing.assert_array_equal(gradient(tokens().logprobs), [0, 0, 0])
    np.testing.assert_allclose(gradient(jnp.log(jnp.array([1.1, 0.9, 1.0]))), [-1.1, 1.8, 0], rtol=1e-6)


def test_the_kl_pulls_by_the_distance_to_the_reference():
    # k2 is d^2 / 2, its gradient d: with lp = ref + 0.5, 0.1 * 0.125 and 0.1 * 0.5. None needs no reference.
    given = tokens().replace(advantages=jnp.zeros(3), ref_logprobs=tokens().logprobs - jnp.array([0.5, -0.5, 9.0]))
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
        (
            ReinforcePlusPlusBaseline(),
            FACTS._replace(samples=1),
            "ReinforcePlusPlusBaseline compares the samples of one prompt",
        ),
        (ReinforcePlusPlusBaseline(clip_low=1.5), FACTS, r"ReinforcePlusPlusBaseline\.clip_low = 1\.5"),
        (ReinforcePlusPlusBaseline(clip_high=-0.1), FACTS, r"ReinforcePlusPlusBaseline\.clip_high = -0\.1"),
        (ReinforcePlusPlusBaseline(dual_clip=1.0), FACTS, r"ReinforcePlusPlusBaseline\.dual_clip = 1\.0"),
        (ReinforcePlusPlusBaseline(kl=0.0), FACTS, r"Baseline\.kl = 0\.0 must be above 0, or None"),
    ],
)
def test_illegal_combinations_are_refused(config, facts, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, facts)
