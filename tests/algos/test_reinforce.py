from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.common import TruncatedImportance
from jrl.algos.contract import Facts, Groups, Tokens
from jrl.algos.reinforce import Reinforce

OBJECTIVE = ALGOS["Reinforce"]
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
    fn = jax.jit(lambda config, g, state: OBJECTIVE.advantages(config, g, OBJECTIVE.shape(config, g), state))
    got, state, counters = fn(Reinforce(), groups, {"baseline": jnp.float32(0.2)})
    np.testing.assert_allclose(got, [[0, 0.8], [-0.2, -0.2], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(state["baseline"], 0.215, rtol=1e-6)
    np.testing.assert_allclose(counters["baseline"], 0.215, rtol=1e-6)
    _, slower, _ = fn(Reinforce(baseline_decay=0.5), groups, {"baseline": jnp.float32(0.2)})
    np.testing.assert_allclose(slower["baseline"], 0.35, rtol=1e-6)  # 0.5 * 0.2 + 0.5 * 0.5
    np.testing.assert_array_equal(OBJECTIVE.keep(Reinforce(), groups), [True, True, False])


def test_the_first_batch_is_compared_with_its_own_mean():
    # b is NaN before the first step: R = [1, 0, 0.5], b' = 0.5, and the advantages are R - 0.5
    reward = jnp.array([1.0, 0.0, 0.5])
    groups = Groups(
        reward=reward,
        outcome=reward,
        valid=jnp.ones(3, bool),
        group=jnp.arange(3, dtype=jnp.int32),
        action_mask=jnp.ones((3, 1), bool),
        finish=jnp.zeros(3, jnp.int8),
        num_groups=3,
        max_completion=1,
    )
    state = OBJECTIVE.init_state(Reinforce())
    assert jnp.isnan(state["baseline"]) and state["baseline"].dtype == jnp.float32
    got, state, _ = OBJECTIVE.advantages(Reinforce(), groups, reward, state)
    np.testing.assert_allclose(got[:, 0], [0.5, -0.5, 0], rtol=1e-6)
    np.testing.assert_allclose(state["baseline"], 0.5, rtol=1e-6)


def test_with_a_kl_in_the_reward_what_came_before_a_token_is_not_its_merit():
    # Row 0: k1 = [0.5, -0.2], r = [-0.05, 1 + 0.02], sum 0.97; row 1: one token, k1 = 1, r = 0 - 0.1, sum -0.1.
    # b = mean of the sums = 0.435. A = [0.97 - 0.435, 1.02 - 0.435] and -0.1 - 0.435. A row without a verdict: nothing.
    groups = Groups(
        reward=jnp.array([1.0, 0.0, jnp.nan]),
        outcome=jnp.zeros(3),
        valid=jnp.array([True, True, False]),
        group=jnp.arange(3, dtype=jnp.int32),
        action_mask=jnp.array([[True, True], [False, True], [True, True]]),
        finish=jnp.zeros(3, jnp.int8),
        num_groups=3,
        max_completion=2,
        old_logprobs=jnp.array([[-1.0, -2.0], [jnp.nan, -1.0], [-1.0, -1.0]]),
        ref_logprobs=jnp.array([[-1.5, -1.8], [jnp.nan, -2.0], [-9.0, -9.0]]),
    )
    config = Reinforce(kl_in_reward=0.1)
    state = OBJECTIVE.init_state(config)
    got, after, _ = jax.jit(lambda g: OBJECTIVE.advantages(config, g, g.reward, state))(groups)
    np.testing.assert_allclose(got, [[0.535, 0.585], [0, -0.535], [0, 0]], atol=1e-6)
    np.testing.assert_allclose(after["baseline"], 0.435, rtol=1e-6)
    needs = OBJECTIVE.needs(config)
    assert needs.reference and needs.credit_logprobs
    assert not OBJECTIVE.needs(Reinforce()).reference and not OBJECTIVE.needs(Reinforce()).credit_logprobs


def test_rewards_of_spans_are_credited_to_their_tokens_and_those_before():
    # r = [0, 0.3, 1]: returns-to-go [1.3, 1.3, 1]; b = 1.3, the only row's own.
    groups = Groups(
        reward=jnp.array([1.0]),
        outcome=jnp.zeros(1),
        valid=jnp.ones(1, bool),
        group=jnp.zeros(1, jnp.int32),
        action_mask=jnp.ones((1, 3), bool),
        finish=jnp.zeros(1, jnp.int8),
        num_groups=1,
        max_completion=3,
        token_reward=jnp.array([[0, 0.3, 0]]),
    )
    got, _, _ = OBJECTIVE.advantages(Reinforce(), groups, groups.reward, OBJECTIVE.init_state(Reinforce()))
    np.testing.assert_allclose(got, [[0, 0, -0.3]], atol=1e-6)


def test_a_step_without_a_verdict_leaves_the_baseline():
    groups = Groups(
        reward=jnp.full(2, jnp.nan),
        outcome=jnp.full(2, jnp.nan),
        valid=jnp.zeros(2, bool),
        group=jnp.arange(2, dtype=jnp.int32),
        action_mask=jnp.ones((2, 1), bool),
        finish=jnp.zeros(2, jnp.int8),
        num_groups=2,
        max_completion=1,
    )
    for before in (jnp.float32(0.2), OBJECTIVE.init_state(Reinforce())["baseline"]):
        got, state, _ = OBJECTIVE.advantages(Reinforce(), groups, groups.reward, {"baseline": before})
        np.testing.assert_array_equal(got, 0)
        np.testing.assert_array_equal(state["baseline"], before)


def test_the_baseline_stays_where_it_is_between_the_updates_and_the_next_batch():
    state = {"baseline": jnp.float32(0.2)}
    assert OBJECTIVE.next_state(Reinforce(), state, {"loss": jnp.float32(1)}) is state


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
        state = OBJECTIVE.init_state(config)
        loss = lambda lp, c=config, s=state: OBJECTIVE.token_loss(c, tokens.replace(logprobs=lp), s)[0].sum()
        np.testing.assert_allclose(jax.jit(loss)(tokens.logprobs), weight, rtol=1e-6)
        np.testing.assert_allclose(jax.grad(loss)(tokens.logprobs), [-0.5 * weight], rtol=1e-6)
    bonus, _ = OBJECTIVE.token_loss(Reinforce(entropy_bonus=0.01), tokens, state)
    np.testing.assert_allclose(bonus, [1 - 0.03], rtol=1e-6)


def test_tokens_weigh_alike():
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_array_equal(OBJECTIVE.weights(Reinforce(), mask, 3), mask)
    assert OBJECTIVE.denominator(Reinforce(), mask, 8, 3) == 4


def test_it_needs_no_group_no_reference_and_no_refill():
    OBJECTIVE.check(Reinforce(), FACTS)
    assert not OBJECTIVE.needs(Reinforce()).reference
    assert OBJECTIVE.refill(Reinforce()) is None


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
        OBJECTIVE.check(config, facts)
