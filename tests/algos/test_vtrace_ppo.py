from __future__ import annotations

import numpy as np
import pytest
from small_batches import credited_values, rows_with_values, whitened

from jrl.algos import ALGOS
from jrl.algos.common import TruncatedImportance
from jrl.algos.contract import Facts
from jrl.algos.ppo import PPO
from jrl.algos.vtrace_ppo import VTracePPO

OBJECTIVE = ALGOS["VTracePPO"]
FACTS = Facts(samples=1, lag=0, updates_per_batch=4, truncated_sampling=False, greedy=False, max_completion=6)


def test_stale_tokens_are_weighed_and_cut_the_trace():
    # w = 1 but for token 1 of row 0 at 0.5 and token 1 of row 1 at exp(0.3), which is cut to 1. Row 0, from the end:
    # vs_3 = 0.6 + (1 - 0.6) = 1; vs_1 = 0.4 + 0.5 (0.6 - 0.4) + 0.5 (1 - 0.6) = 0.7; vs_0 = 0.2 + 0.2 + 0.3
    # = 0.7. A_3 = 0.4; A_1 = 0.5 (1 - 0.4) = 0.3; A_0 = 0.7 - 0.2 = 0.5. Row 1: vs = 0, 0; A = 0 - 0.1 and 0 - 0.5.
    given = rows_with_values()
    behaviour = given.behaviour_logprobs.at[0, 1].add(np.log(2.0)).at[1, 1].add(-0.3)
    advantages, returns = credited_values(OBJECTIVE, VTracePPO(), given.replace(behaviour_logprobs=behaviour))
    np.testing.assert_allclose(advantages, whitened([0.5, 0.3, 0.4], [-0.5, -0.1]), atol=1e-5)
    np.testing.assert_allclose(returns, [[0.7, 0.7, 0, 1], [0] * 4, [0] * 4, [0] * 4], atol=1e-6)


def test_on_its_own_samples_it_is_ppo():
    advantages, returns = credited_values(OBJECTIVE, VTracePPO(discount=0.9), rows_with_values())
    ppo, config = ALGOS["PPO"], PPO(discount=0.9, gae_lambda=1.0)
    np.testing.assert_allclose(
        advantages, ppo.advantages(config, rows_with_values(), rows_with_values().reward, ())[0], atol=1e-6
    )
    np.testing.assert_allclose(returns, ppo.returns(config, rows_with_values(), rows_with_values().reward), atol=1e-6)


def test_the_bounds_are_those_of_the_configuration():
    # All w = 2, bounds 2 and 1: row 1's last token has vs = 0.1 + 2 (0 - 0.1) = -0.1.
    given = rows_with_values()
    given = given.replace(behaviour_logprobs=given.behaviour_logprobs - np.log(2.0))
    _, returns = credited_values(OBJECTIVE, VTracePPO(max_weight=2.0), given)
    np.testing.assert_allclose(returns[1, 2], -0.1, atol=1e-6)
    # Token 1: 0.5 + 2 (0.1 - 0.5) + 1 (-0.1 - 0.1) = -0.5; with max_trace 2: -0.7.
    np.testing.assert_allclose(returns[1, 1], -0.5, atol=1e-6)
    _, returns = credited_values(OBJECTIVE, VTracePPO(max_weight=2.0, max_trace=2.0), given)
    np.testing.assert_allclose(returns[1, 1], -0.7, atol=1e-6)


def test_it_reads_log_probs_for_its_credit_and_its_loss_is_that_of_ppo():
    OBJECTIVE.check(VTracePPO(), FACTS)
    assert OBJECTIVE.needs(VTracePPO()) == ALGOS["PPO"].needs(PPO())._replace(credit_logprobs=True)
    assert OBJECTIVE.token_loss is ALGOS["PPO"].token_loss


@pytest.mark.parametrize(
    "config, message",
    [
        (VTracePPO(value_clip=0.0), r"VTracePPO\.value_clip = 0\.0"),
        (VTracePPO(discount=0.0), r"VTracePPO\.discount = 0\.0"),
        (VTracePPO(max_weight=0.0), r"VTracePPO\.max_weight = 0\.0"),
        (VTracePPO(max_trace=-1.0), r"VTracePPO\.max_trace = -1\.0"),
        (VTracePPO(max_trace=1.5), r"VTracePPO\.max_trace = 1\.5 must not exceed max_weight = 1\.0"),
        (VTracePPO(importance=TruncatedImportance()), r"VTracePPO\.importance must be None"),
    ],
)
def test_illegal_combinations_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)
