from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import credited_values, rows_with_values, whitened

from jrl.algos import ALGOS
from jrl.algos.contract import Facts
from jrl.algos.ppo import PPO
from jrl.algos.reward_shaping import Potential, Shaping, shaped
from jrl.algos.say_self import SaySelf
from jrl.config.errors import ConfigError
from jrl.resolve import load_config

OBJECTIVE = ALGOS["SaySelf"]
FACTS = Facts(samples=1, lag=0, updates_per_batch=4, truncated_sampling=False, greedy=False, max_completion=4)


def rows(**fields):
    """The confidence of row 0 begins with its second token, and is rewarded with 0.92; that of row 1 with its last,
    -0.28. Rewards of rows are 0."""
    reward = jnp.array([0.0, 0.0, jnp.nan, 0.0])
    marks = jnp.zeros((4, 4)).at[0, 1].set(0.92).at[1, 2].set(-0.28)
    return rows_with_values().replace(reward=reward, token_reward=marks, **fields)


def test_tokens_before_the_confidence_do_not_learn():
    found = jax.jit(lambda g: OBJECTIVE.keep_tokens(SaySelf(), g))(rows())
    expected = [[False, True, False, True], [False, False, True, False], [False] * 4, [False] * 4]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(OBJECTIVE.keep(SaySelf(), rows()), [True, True, False, False])


def test_the_reward_of_the_confidence_is_the_rows_by_hand():
    # lambda 1: values 0.4 and 0.6 against a return of 0.92, 0.1 against -0.28.
    advantages, returns = credited_values(OBJECTIVE, SaySelf(gae_lambda=1.0), rows())
    each = np.array([0.92 - 0.4, 0.92 - 0.6, -0.28 - 0.1])
    a, b, c = (each - each.mean()) / np.sqrt(each.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(advantages, [[0, a, 0, b], [0, 0, c, 0], [0] * 4, [0] * 4], rtol=1e-5)
    np.testing.assert_allclose(returns, [[0, 0.92, 0, 0.92], [0, 0, -0.28, 0], [0] * 4, [0] * 4], rtol=1e-5)


def test_a_row_without_a_confidence_is_not_learned_from():
    marks = jnp.zeros((4, 4)).at[1, 1].set(-1.0)
    given = rows().replace(token_reward=marks)
    np.testing.assert_array_equal(OBJECTIVE.keep(SaySelf(), given), [False, True, False, False])
    np.testing.assert_array_equal(credited_values(OBJECTIVE, SaySelf(), given)[0][0], 0)


def test_where_no_verifier_rewards_spans_it_is_ppo():
    given = rows_with_values()
    found = credited_values(OBJECTIVE, SaySelf(gae_lambda=1.0), given)
    # 1 - 0.2, 1 - 0.4, 1 - 0.6 and 0 - 0.5, 0 - 0.1
    np.testing.assert_allclose(found[0], whitened([0.8, 0.6, 0.4], [-0.5, -0.1]), rtol=1e-5)
    np.testing.assert_allclose(found[0], credited_values(ALGOS["PPO"], PPO(gae_lambda=1.0), given)[0], rtol=1e-6)


def test_illegal_combinations_are_refused():
    OBJECTIVE.check(SaySelf(), FACTS)
    with pytest.raises(ValueError, match=r"SaySelf\.value_clip = 0\.0"):
        OBJECTIVE.check(SaySelf(value_clip=0.0), FACTS)
    with pytest.raises(ValueError, match=r"add @ConfidenceSpan\(\)"):
        OBJECTIVE.check(SaySelf(), FACTS._replace(without_spans=True))


def test_a_reward_that_a_potential_takes_back_is_refused():
    # Phi before a token is the sum of the rewards before it, 0 at the end: 0.92 on its token, -0.92 on the last one.
    paid_back = shaped(Shaping(potential=Potential()), rows())
    np.testing.assert_allclose(paid_back.token_reward[0], [0, 0.92, 0, -0.92])
    np.testing.assert_array_equal(credited_values(OBJECTIVE, SaySelf(gae_lambda=1.0), paid_back)[1], 0)
    with pytest.raises(ConfigError, match=r"every row would earn 0\. Leave Shaping\.potential out"):
        load_config("configs/algos/say_self.gin", ["Online.shaping=@Shaping()", "Shaping.potential=@Potential()"])


def test_the_clip_limits_the_reward_of_the_confidence():
    returns = credited_values(OBJECTIVE, SaySelf(gae_lambda=1.0, reward_clip=0.5), rows())[1]
    np.testing.assert_allclose(returns, [[0, 0.5, 0, 0.5], [0, 0, -0.28, 0], [0] * 4, [0] * 4], rtol=1e-5)
