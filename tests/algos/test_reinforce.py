from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.common import TruncatedImportance
from jrl.algos.contract import Facts, Groups, Tokens
from jrl.algos.reinforce import Reinforce

ALGORITHM = ALGOS["Reinforce"]
FACTS = Facts(samples=1, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_the_advantage_is_the_reward_less_its_moving_average():
    # R = [1, 0], b = 0.2: [0.8, -0.2]; b' = 0.95 * 0.2 + 0.05 * 0.5 = 0.215. The row without a verdict: nothing
    groups = Groups(
        reward=jnp.array([1.0, 0.0, jnp.nan]),
        outcome=jnp.zeros(3),
        valid=jnp.array([True, True, False]),
        group=jnp.arange(3, dtype=jnp.int32),
        action_mask=jnp.array([[False, True], [True, True], [True, True]]),
        finish=jnp.zeros(3, jnp.int8),
        num_groups=3,
        max_completion=2,
    )
    fn = jax.jit(lambda config, g, b: ALGORITHM.advantages(config, g, ALGORITHM.shape(config, g), b))
    got, baseline, counters = fn(Reinforce(), groups, jnp.float32(0.2))
    np.testing.assert_allclose(got, [[0, 0.8], [-0.2, -0.2], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(baseline, 0.215, rtol=1e-6)
    np.testing.assert_allclose(counters["baseline"], 0.215, rtol=1e-6)
    _, slower, _ = fn(Reinforce(baseline_decay=0.5), groups, jnp.float32(0.2))
    np.testing.assert_allclose(slower, 0.35, rtol=1e-6)  # 0.5 * 0.2 + 0.5 * 0.5
    np.testing.assert_array_equal(ALGORITHM.keep(Reinforce(), groups), [True, True, False])


def test_the_loss_is_the_policy_gradient_by_hand():
    # A = 0.5, logprob = -2: 1, gradient -0.5; weight exp(old - behaviour) = exp(0.1) multiplies both
    tokens = Tokens(
        logprobs=jnp.array([-2.0]),
        old_logprobs=jnp.array([-2.0]),
        behaviour_logprobs=jnp.array([-2.1]),
        ref_logprobs=None,
        entropy=jnp.array([3.0]),
        advantages=jnp.array([0.5]),
        mask=jnp.ones(1, bool),
        segment=jnp.zeros(1, jnp.int32),
        num_segments=1,
    )
    for config, weight in ((Reinforce(), 1.0), (Reinforce(importance=TruncatedImportance()), np.exp(0.1))):
        loss = lambda lp, config=config: ALGORITHM.token_loss(config, tokens.replace(logprobs=lp))[0].sum()
        np.testing.assert_allclose(jax.jit(loss)(tokens.logprobs), weight, rtol=1e-6)
        np.testing.assert_allclose(jax.grad(loss)(tokens.logprobs), [-0.5 * weight], rtol=1e-6)
    bonus, _ = ALGORITHM.token_loss(Reinforce(entropy_bonus=0.01), tokens)
    np.testing.assert_allclose(bonus, [1 - 0.03], rtol=1e-6)


def test_tokens_weigh_alike():
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_array_equal(ALGORITHM.weights(Reinforce(), mask, 3), mask)
    assert ALGORITHM.denominator(Reinforce(), mask, 8, 3) == 4


def test_it_needs_no_group_no_reference_and_no_refill():
    ALGORITHM.check(Reinforce(), FACTS)
    assert not ALGORITHM.needs_reference(Reinforce())
    assert ALGORITHM.refill(Reinforce()) is None


@pytest.mark.parametrize(
    "config, facts, message",
    [
        (Reinforce(baseline_decay=1.0), FACTS, r"Reinforce\.baseline_decay = 1\.0"),
        (Reinforce(baseline_decay=-0.1), FACTS, r"Reinforce\.baseline_decay = -0\.1"),
        (Reinforce(), FACTS._replace(updates_per_batch=2), "one update a batch, got updates_per_batch=2"),
    ],
)
def test_illegal_combinations_are_refused(config, facts, message):
    with pytest.raises(ValueError, match=message):
        ALGORITHM.check(config, facts)
