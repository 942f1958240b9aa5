from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.common import TruncatedImportance
from jrl.algos.contract import Facts, Groups, Tokens
from jrl.algos.ppo import PPO

OBJECTIVE = ALGOS["PPO"]
FACTS = Facts(samples=1, lag=0, updates_per_batch=4, truncated_sampling=False, greedy=False, max_completion=3)


def groups():
    """A row with a tool's answer in it, one of two tokens, one without a verdict and one without a token."""
    return Groups(
        reward=jnp.array([1.0, 0.0, jnp.nan, 5.0]),
        outcome=jnp.zeros(4),
        valid=jnp.array([True, True, False, True]),
        group=jnp.arange(4, dtype=jnp.int32),
        action_mask=jnp.array([[True, False, True], [False, True, True], [True] * 3, [False] * 3]),
        finish=jnp.zeros(4, jnp.int8),
        num_groups=4,
        max_completion=3,
        values=jnp.array([[0.2, jnp.nan, 0.6], [jnp.nan, 0.5, 0.1], [9.0] * 3, [jnp.nan] * 3]),
    )


def test_the_reward_stands_on_the_last_token_and_advantages_are_whitened_after_returns():
    # Row 0: A_2 = 1 - 0.6 = 0.4, A_0 = 0.6 - 0.2 + 0.95 * 0.4 = 0.78. Row 1: A_2 = 0 - 0.1, A_1 = 0.1 - 0.5 - 0.095 =
    # -0.495. Their mean is 0.14625, their variance (n - 1) 0.312623; (0.4 - 0.14625) / sqrt(0.312623) = 0.453833.
    fn = jax.jit(lambda config, g: (OBJECTIVE.advantages(config, g, g.reward, jnp.float32(0.7)),
                                    OBJECTIVE.returns(config, g, g.reward)))  # fmt: skip
    (advantages, state, counters), returns = fn(PPO(), groups())
    expected = np.array([[1.133464, 0, 0.453833], [0, -1.146877, -0.440419], [0] * 3, [0] * 3])
    np.testing.assert_allclose(advantages, expected, atol=1e-6)
    np.testing.assert_allclose(returns, [[0.98, 0, 1.0], [0, 0.005, 0], [0] * 3, [0] * 3], atol=1e-6)
    assert state == np.float32(0.7)  # whatever it is: theirs has none
    assert {name: int(counters[name]) for name in ("unscorable", "aborted")} == {"unscorable": 1, "aborted": 1}
    np.testing.assert_array_equal(OBJECTIVE.keep(PPO(), groups()), [True, True, False, False])


def test_with_trace_and_discount_one_the_return_is_the_reward_on_every_token():
    config, g = PPO(gae_lambda=1.0), groups()
    np.testing.assert_allclose(OBJECTIVE.returns(config, g, g.reward)[:2], [[1, 0, 1], [0, 0, 0]], atol=1e-6)


def test_the_kl_is_in_advantages_and_returns():
    # k1 = [0.5, -, 0.2], beta 0.1, on row 0: r_0 = -0.05, r_2 = 1 - 0.02. A_2 = 0.98 - 0.6 = 0.38,
    # A_0 = -0.05 + 0.6 - 0.2 + 0.95 * 0.38 = 0.711. Row 1, k1 = [-, 0, -1]: r_2 = 0 + 0.1: A_2 = 0.1 - 0.1 = 0,
    # A_1 = 0.1 - 0.5 + 0 = -0.4.
    nan = jnp.nan
    given = groups().replace(
        old_logprobs=jnp.array([[-1, nan, -1], [nan, -1, -2], [0.0] * 3, [nan] * 3]),
        ref_logprobs=jnp.array([[-1.5, nan, -1.2], [nan, -1, -1], [9.0] * 3, [nan] * 3]),
    )
    config = PPO(kl_in_reward=0.1)
    returns = jax.jit(lambda g: OBJECTIVE.returns(config, g, g.reward))(given)
    expected = [[0.711 + 0.2, 0, 0.38 + 0.6], [0, -0.4 + 0.5, 0 + 0.1], [0] * 3, [0] * 3]
    np.testing.assert_allclose(returns, expected, atol=1e-6)
    advantages, _, _ = OBJECTIVE.advantages(config, given, given.reward, ())
    a = np.array([0.711, 0.38, -0.4, 0.0])
    white = (a - a.mean()) / np.sqrt(a.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.asarray(advantages)[[0, 0, 1, 1], [0, 2, 1, 2]], white, atol=1e-5)
    assert OBJECTIVE.needs(config).reference and OBJECTIVE.needs(config).credit_logprobs


def test_the_kl_in_the_reward_is_by_the_estimator_asked_for():
    # With lambda 1 returns are the rewards to go, of d = 0.5 and 0.2 in row 0: 0.1 * (0.125 + 0.02) less than 1.
    given = groups().replace(
        old_logprobs=jnp.array([[-1.0, 0, -1], [0, -1, -2], [0.0] * 3, [0] * 3]),
        ref_logprobs=jnp.array([[-1.5, 0, -1.2], [0, -1, -1], [9.0] * 3, [0] * 3]),
    )
    config = PPO(kl_in_reward=0.1, kl_in_reward_estimator="k2", gae_lambda=1.0)
    returns = jax.jit(lambda g: OBJECTIVE.returns(config, g, g.reward))(given)
    # In row 1 d = 0 and -1: the penalty of a token that grew less likely is one too.
    expected = [[1 - 0.0145, 0, 1 - 0.002], [0, -0.05, -0.05], [0] * 3, [0] * 3]
    np.testing.assert_allclose(returns, expected, atol=1e-6)


def test_rewards_of_spans_are_added_on_their_tokens():
    # With lambda 1 returns are the rewards to go: row 0 has 0.25 on its first token, beside 1 on the last.
    given = groups().replace(token_reward=jnp.array([[0.25, 7, 0], [0, 0, -1], [9] * 3, [0] * 3]))
    returns = OBJECTIVE.returns(PPO(gae_lambda=1.0), given, given.reward)
    np.testing.assert_allclose(returns, [[1.25, 0, 1], [0, -1, -1], [0] * 3, [0] * 3], atol=1e-6)


def test_rewards_are_clipped_before_and_whitened_after_the_kl():
    config = PPO(reward_clip=0.5)
    np.testing.assert_array_equal(OBJECTIVE.shape(config, groups()), [0.5, 0, np.nan, 0.5])
    assert OBJECTIVE.shape(PPO(), groups()) is not None and OBJECTIVE.shape(PPO(), groups())[3] == 5
    # Rewards of the tokens that count: [0, 1, 0, 0]: mean 0.25, std 0.5; (r - 0.25) / 0.5 + 0.25 = -0.25 and 1.75.
    returns = OBJECTIVE.returns(PPO(gae_lambda=1.0, whiten_rewards=True), groups(), groups().reward)
    np.testing.assert_allclose(returns, [[1.5, 0, 1.75], [0, -0.5, -0.25], [0] * 3, [0] * 3], atol=1e-6)


@pytest.mark.parametrize("name", ["PPO", "VAPO", "MacroPPO", "VTracePPO", "DreamerPPO", "PPOMax", "PFPPO", "SaySelf"])
def test_what_whitened_rewards_are_divided_by_is_a_metric(name):
    # As above: the rewards of tokens [0, 1, 0, 0] have std 0.5, and a coefficient of a KL in them doubles.
    objective = ALGOS[name]
    given = groups().replace(
        old_logprobs=jnp.zeros((4, 3)),
        behaviour_logprobs=jnp.zeros((4, 3)),
        ref_logprobs=jnp.zeros((4, 3)),
        sample=jnp.arange(4, dtype=jnp.int32),
    )
    credit = lambda config: objective.advantages(config, given, given.reward, objective.init_state(config))[2]
    found = credit(objective.config(whiten_rewards=True))["token_reward_deviation"]
    np.testing.assert_allclose(found, 0.5, rtol=1e-6)
    assert "token_reward_deviation" not in credit(objective.config())


def tokens():
    return Tokens(
        logprobs=jnp.log(jnp.array([1.5, 1.0])),
        old_logprobs=jnp.zeros(2),
        behaviour_logprobs=jnp.full(2, -np.log(2.0), jnp.float32),
        ref_logprobs=None,
        entropy=jnp.array([3.0, 3.0]),
        advantages=jnp.array([1.0, -2.0]),
        mask=jnp.ones(2, bool),
        segment=jnp.zeros(2, jnp.int32),
        num_segments=1,
        values=jnp.array([0.9, 0.9]),
        old_values=jnp.array([0.5, 0.5]),
        returns=jnp.array([0.0, 1.0]),
    )


def test_the_loss_is_the_clip_and_the_value_loss_with_its_coefficient():
    # rho 1.5, A 1: -1.2; value 0.5 * 0.9^2 = 0.405. rho 1, A -2: 2; value 0.5 * 0.3^2 = 0.045, clipped.
    loss, metrics = jax.jit(OBJECTIVE.token_loss)(PPO(), tokens(), ())
    np.testing.assert_allclose(loss, [-1.2 + 0.0405, 2 + 0.0045], rtol=1e-6)
    np.testing.assert_allclose(metrics["value/loss"], [0.405, 0.045], rtol=1e-6)
    np.testing.assert_allclose(metrics["value/mean"], [0.9, 0.9], rtol=1e-6)
    np.testing.assert_array_equal(metrics["value/clipped"], [0, 1])
    np.testing.assert_array_equal(metrics["clip_fraction_high"], [1, 0])
    loss, _ = OBJECTIVE.token_loss(PPO(value_coefficient=1.0, value_clip=None, entropy_bonus=0.01), tokens(), ())
    np.testing.assert_allclose(loss, [-1.2 + 0.405 - 0.03, 2 + 0.005 - 0.03], rtol=1e-5)


def test_a_critic_of_its_own_learns_by_the_value_loss_alone():
    # 0.5 * 0.9^2 = 0.405 and 0.5 * 0.3^2 = 0.045, unweighted; the policy has -1.2 and 2 and no value among its metrics.
    bare = tokens().replace(logprobs=None, old_logprobs=None, behaviour_logprobs=None, advantages=None, entropy=None)
    loss, metrics = jax.jit(OBJECTIVE.value_loss)(PPO(value_coefficient=7.0), bare, ())
    np.testing.assert_allclose(loss, [0.405, 0.045], rtol=1e-6)
    assert set(metrics) == {"value/loss", "value/clipped", "value/mean"}
    loss, metrics = jax.jit(OBJECTIVE.token_loss)(PPO(), tokens().replace(values=None), ())
    np.testing.assert_allclose(loss, [-1.2, 2], rtol=1e-6)
    assert not any(name.startswith("value/") for name in metrics)


def test_importance_weights_leave_the_value_loss_alone():
    # old - behaviour = log 2: the policy's loss counts twice.
    loss, _ = OBJECTIVE.token_loss(PPO(importance=TruncatedImportance()), tokens(), ())
    np.testing.assert_allclose(loss, [-2.4 + 0.0405, 4 + 0.0045], rtol=1e-6)


def test_the_value_pulls_by_its_coefficient():
    # d/dv of 0.1 * 0.5 * (v - Ret)^2 = 0.1 * 0.9; 0 where the clip binds.
    total = lambda v: OBJECTIVE.token_loss(PPO(), tokens().replace(values=v), ())[0].sum()
    np.testing.assert_allclose(jax.jit(jax.grad(total))(tokens().values), [0.09, 0], rtol=1e-6)


def test_tokens_weigh_alike():
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_array_equal(OBJECTIVE.weights(PPO(), mask, 3), mask)
    assert OBJECTIVE.denominator(PPO(), mask, 8, 3) == 4


def test_it_needs_no_group_no_reference_and_no_refill():
    OBJECTIVE.check(PPO(), FACTS)
    assert not OBJECTIVE.needs(PPO()).reference
    assert OBJECTIVE.refill(PPO()) is None


@pytest.mark.parametrize(
    "config, message",
    [
        (PPO(discount=0.0), r"PPO\.discount = 0\.0"),
        (PPO(discount=1.1), r"PPO\.discount = 1\.1"),
        (PPO(gae_lambda=-0.1), r"PPO\.gae_lambda = -0\.1"),
        (PPO(gae_lambda=1.5), r"PPO\.gae_lambda = 1\.5"),
        (PPO(value_coefficient=0.0), r"PPO\.value_coefficient = 0\.0"),
        (PPO(value_clip=0.0), r"PPO\.value_clip = 0\.0 must be above 0, or None"),
        (PPO(kl_in_reward_estimator="k4"), r"PPO\.kl_in_reward_estimator = 'k4' must be one of 'k1', 'k2', 'k3'"),
        (PPO(kl_in_reward=0.0), r"PPO\.kl_in_reward = 0\.0 must be above 0, or None"),
        (PPO(reward_clip=0.0), r"PPO\.reward_clip = 0\.0 must be above 0"),
        (PPO(clip_low=1.0), r"PPO\.clip_low = 1\.0"),
    ],
)
def test_illegal_combinations_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)
