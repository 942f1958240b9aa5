from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import rows_with_values

from jrl.algos import ALGOS
from jrl.algos.contract import Facts, shaped_reward
from jrl.algos.ppo import PPO
from jrl.algos.ppo_max import PPOMax

OBJECTIVE = ALGOS["PPOMax"]
FACTS = Facts(samples=1, lag=0, updates_per_batch=4, truncated_sampling=False, greedy=False, max_completion=4)
PLAIN = PPOMax(kl_in_reward=None)
SHAPED = jax.jit(lambda config, g, state: shaped_reward(OBJECTIVE, config, g, state))


def step(config, groups, state):
    reward = SHAPED(config, groups, state)
    return reward, *jax.jit(OBJECTIVE.advantages)(config, groups, reward, state)


def test_rewards_are_divided_by_their_running_deviation():
    # [1, 3] count: std1 1.41421, 0.70711 and 2.12132. Then [5, 1]: mean 2.5, std1 of [1, 3, 5, 1] is 1.91485.
    groups = rows_with_values()
    groups = groups.replace(reward=jnp.array([1.0, 3.0, jnp.nan, 5.0]))
    start = OBJECTIVE.init_state(PLAIN)
    reward, _, state, counters = step(PLAIN, groups, start)
    np.testing.assert_allclose(reward[:2], [0.70711, 2.12132], rtol=1e-5)
    np.testing.assert_allclose(counters["reward_deviation"], 1.41421, rtol=1e-5)
    reward, _, state, counters = step(PLAIN, groups.replace(reward=jnp.array([5.0, 1.0, jnp.nan, 9.0])), state)
    np.testing.assert_allclose(reward[:2], [5 / 1.91485, 1 / 1.91485], rtol=1e-5)
    np.testing.assert_allclose(state, [4, 2.5, 11], rtol=1e-6)
    np.testing.assert_allclose(SHAPED(PPOMax(reward_clip=2.0), groups, start)[:2], [0.70711, 2.0], rtol=1e-5)


def test_advantages_are_whitened_and_then_limited():
    groups = rows_with_values()
    start = OBJECTIVE.init_state(PLAIN)
    _, found, _, counters = step(PLAIN, groups, start)
    reward = SHAPED(PLAIN, groups, start)
    whitened = ALGOS["PPO"].advantages(PPO(), groups, reward, ())[0]
    np.testing.assert_allclose(found, np.clip(whitened, -0.5, 0.5), rtol=1e-6)
    np.testing.assert_allclose(counters["clipped"], (np.abs(whitened) > 0.5).sum() / 5, rtol=1e-6)
    assert 0 < float(counters["clipped"]) < 1
    _, unlimited, _, counters = step(PPOMax(kl_in_reward=None, advantage_clip=None), groups, start)
    np.testing.assert_allclose(unlimited, whitened, rtol=1e-6)
    assert "clipped" not in counters


def test_without_its_options_and_with_a_first_deviation_of_one_it_is_ppo():
    # Rewards 0 and 1.41421 have std1 1.
    groups = rows_with_values().replace(reward=jnp.array([2**0.5, 0.0, jnp.nan, 5.0]))
    config = PPOMax(kl_in_reward=None, advantage_clip=None, reward_clip=None)
    reward, found, _, _ = step(config, groups, OBJECTIVE.init_state(config))
    expected = ALGOS["PPO"].advantages(PPO(), groups, groups.reward, ())[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    returns = OBJECTIVE.returns(config, groups, reward)
    np.testing.assert_allclose(returns, ALGOS["PPO"].returns(PPO(), groups, groups.reward), rtol=1e-5)


def test_illegal_combinations_are_refused():
    OBJECTIVE.check(PPOMax(), FACTS)
    with pytest.raises(ValueError, match=r"PPOMax\.advantage_clip = 0\.0 must be above 0"):
        OBJECTIVE.check(PPOMax(advantage_clip=0.0), FACTS)
    with pytest.raises(ValueError, match=r"PPOMax\.kl_in_reward = 0\.0"):
        OBJECTIVE.check(PPOMax(kl_in_reward=0.0), FACTS)
