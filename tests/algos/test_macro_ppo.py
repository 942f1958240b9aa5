from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import credited_values, rows_with_values, whitened

from jrl.algos import ALGOS, common
from jrl.algos.contract import Facts
from jrl.algos.macro_ppo import MacroPPO
from jrl.algos.ppo import PPO

OBJECTIVE = ALGOS["MacroPPO"]
FACTS = Facts(samples=1, lag=0, updates_per_batch=4, truncated_sampling=False, greedy=False, max_completion=6)


def test_every_token_has_the_advantage_and_the_return_of_its_macro():
    # Macros of two, lambda 0.95. Row 0: [0, 1] of value 0.3 and, after the tool, [3] of 0.6: 1 - 0.6 = 0.4;
    # 0.6 - 0.3 + 0.95 * 0.4 = 0.68. Row 1: one macro of value 0.3: 0 - 0.3. Returns 0.98, 1 and 0.
    advantages, returns = credited_values(OBJECTIVE, MacroPPO(macro_size=2), rows_with_values())
    np.testing.assert_allclose(advantages, whitened([0.68, 0.68, 0.4], [-0.3, -0.3]), atol=1e-5)
    np.testing.assert_allclose(returns, [[0.98, 0.98, 0, 1], [0] * 4, [0] * 4, [0] * 4], atol=1e-6)


def test_macros_of_one_token_are_ppo():
    advantages, returns = credited_values(
        OBJECTIVE, MacroPPO(macro_size=1, discount=0.9, gae_lambda=0.7), rows_with_values()
    )
    ppo, config = ALGOS["PPO"], PPO(discount=0.9, gae_lambda=0.7)
    np.testing.assert_allclose(
        advantages, ppo.advantages(config, rows_with_values(), rows_with_values().reward, ())[0], atol=1e-6
    )
    np.testing.assert_allclose(returns, ppo.returns(config, rows_with_values(), rows_with_values().reward), atol=1e-6)


def test_sizes_may_be_drawn_and_advantages_and_returns_have_the_same_macros():
    rows = rows_with_values().replace(sample=jnp.zeros(4, jnp.int32))
    advantages, returns = credited_values(OBJECTIVE, MacroPPO(macro_size=(1, 2)), rows)
    draws = common.token_draws(rows, 0)
    sizes = [1 + int(draws[0, 0]) % 2, 1 + int(draws[1, 1]) % 2]  # of the macros that begin rows 0 and 1
    fixed = [credited_values(OBJECTIVE, MacroPPO(macro_size=size), rows)[1] for size in sizes]
    np.testing.assert_allclose(returns[:2], [fixed[0][0], fixed[1][1]], atol=1e-6)
    shared = [bool(advantages[0, 0] == advantages[0, 1]), bool(advantages[1, 1] == advantages[1, 2])]
    assert shared == [size == 2 for size in sizes]
    one = credited_values(OBJECTIVE, MacroPPO(macro_size=(2,)), rows)
    two = credited_values(OBJECTIVE, MacroPPO(macro_size=2), rows)
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_array_equal(one[1], two[1])


def test_loss_and_needs_are_those_of_ppo():
    OBJECTIVE.check(MacroPPO(), FACTS)
    assert OBJECTIVE.token_loss is ALGOS["PPO"].token_loss
    assert OBJECTIVE.needs(MacroPPO()) == ALGOS["PPO"].needs(PPO())


@pytest.mark.parametrize(
    "config, message",
    [
        (MacroPPO(value_clip=0.0), r"MacroPPO\.value_clip = 0\.0"),
        (MacroPPO(discount=0.0), r"MacroPPO\.discount = 0\.0"),
        (MacroPPO(macro_size=0), r"MacroPPO\.macro_size = 0 must be 1 to 6"),
        (MacroPPO(macro_size=()), r"MacroPPO\.macro_size = \(\) must be"),
        (MacroPPO(macro_size=(2, 7)), r"MacroPPO\.macro_size = \(2, 7\) must be 1 to 6"),
        (MacroPPO(macro_size=7), r"MacroPPO\.macro_size = 7 must be 1 to 6"),
    ],
)
def test_illegal_combinations_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)
