from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import rows_with_values

from jrl.algos import ALGOS
from jrl.algos.contract import Facts, shaped_reward
from jrl.algos.curiosity import Curiosity
from jrl.algos.ppo import PPO

OBJECTIVE = ALGOS["Curiosity"]
FACTS = Facts(samples=1, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=4)
CONFIG = Curiosity(history=8, neighbors=1, max_order=1, width=512)
SHAPED = jax.jit(lambda config, g, state: shaped_reward(OBJECTIVE, config, g, state))
CREDIT = jax.jit(lambda config, g, state: OBJECTIVE.advantages(config, g, SHAPED(config, g, state), state))


def rows():
    """Row 0 says 1 2 and, after a tool, 3; row 1 says 1 4; the third has no verdict, the fourth no token."""
    return rows_with_values().replace(
        tokens=jnp.array([[1, 2, 9, 3], [9, 1, 4, 9], [5, 6, 7, 8], [1, 2, 3, 4]], jnp.int32),
        sample=jnp.zeros(4, jnp.int32),
    )


def test_what_was_said_before_is_worth_less():
    # An empty history costs nothing. Then row 0 was said, cosine 1, and row 1: 1 and 4 against 1 2 3 has the cosine
    # 1 / sqrt(6), but against itself 1. Row 1 with other tokens, 1 5: 0.5 to the row 1 of before.
    start = OBJECTIVE.init_state(CONFIG)
    np.testing.assert_array_equal(SHAPED(CONFIG, rows(), start)[:2], [1, 0])
    _, state, counters = CREDIT(CONFIG, rows(), start)
    assert int(state.count) == 2 and float(counters["similarity"]) == 0
    np.testing.assert_allclose(SHAPED(CONFIG, rows(), state)[:2], [1 - 0.5, -0.5], rtol=1e-6)
    other = rows().replace(tokens=rows().tokens.at[1, 2].set(5))
    np.testing.assert_allclose(SHAPED(CONFIG, other, state)[:2], [0.5, -0.25], atol=1e-6)
    np.testing.assert_allclose(CREDIT(CONFIG, other, state)[2]["similarity"], 0.75, rtol=1e-6)


def test_with_an_empty_history_it_is_ppo():
    start = OBJECTIVE.init_state(CONFIG)
    found = CREDIT(CONFIG, rows(), start)[0]
    np.testing.assert_allclose(found, ALGOS["PPO"].advantages(PPO(), rows(), rows().reward, ())[0], rtol=1e-6)
    # and with one the advantages and the returns are those of the shaped reward
    _, state, _ = CREDIT(CONFIG, rows(), start)
    reward = SHAPED(CONFIG, rows(), state)
    np.testing.assert_allclose(CREDIT(CONFIG, rows(), state)[0], ALGOS["PPO"].advantages(PPO(), rows(), reward, ())[0],
                               rtol=1e-6)  # fmt: skip
    returns = OBJECTIVE.returns(CONFIG, rows(), reward)
    np.testing.assert_allclose(returns, ALGOS["PPO"].returns(PPO(), rows(), reward), rtol=1e-6)


def test_the_history_keeps_its_form_and_forgets_the_oldest():
    state = OBJECTIVE.init_state(CONFIG)
    for number in range(6):
        shifted = rows().replace(tokens=rows().tokens + 10 * number)
        _, state, _ = CREDIT(CONFIG, shifted, state)
    assert state.embeddings.shape == (8, 512) and state.embeddings.dtype == jnp.float32
    np.testing.assert_array_equal(SHAPED(CONFIG, rows(), state)[:2], [1, 0])  # what step 0 said is forgotten
    last = rows().replace(tokens=rows().tokens + 50)
    np.testing.assert_allclose(SHAPED(CONFIG, last, state)[:2], [0.5, -0.5], rtol=1e-6)


def test_what_it_needs_and_refuses():
    needs = OBJECTIVE.needs(Curiosity())
    assert needs.credit_tokens and needs.values and needs.entropy_gradient
    OBJECTIVE.check(Curiosity(), FACTS)
    for field, value in (("novelty", 0.0), ("neighbors", 0), ("history", 0), ("max_order", 0), ("width", 0)):
        with pytest.raises(ValueError, match=rf"Curiosity\.{field} = {value} must be above 0"):
            OBJECTIVE.check(Curiosity(**{field: value}), FACTS)
