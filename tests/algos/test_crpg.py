from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.contract import Facts, Groups
from jrl.algos.crpg import CRPG

OBJECTIVE = ALGOS["CRPG"]
FACTS = Facts(samples=1, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=2)
NAN = float("nan")


def test_the_advantage_is_the_bounded_reward_less_the_mean_of_the_batch():
    # Log-ratios to the reference 2, 0 and 12, limit 10: 0.8 * 1, 1 * 0.5, 0 * 1, mean 1.3 / 3. The fourth row is not
    # judged, the fifth has no token.
    groups = Groups(
        reward=jnp.array([1.0, 0.5, 1.0, NAN, 1.0]),
        outcome=jnp.zeros(5),
        valid=jnp.array([True, True, True, False, True]),
        group=jnp.arange(5, dtype=jnp.int32),
        action_mask=jnp.array([[True, True], [False, True], [True, True], [True, True], [False, False]]),
        finish=jnp.zeros(5, jnp.int8),
        num_groups=5,
        max_completion=2,
        old_logprobs=jnp.array([[-1.0, -2.0], [NAN, -1.0], [-1.0, -1.0], [NAN, NAN], [NAN, NAN]]),
        ref_logprobs=jnp.array([[-2.5, -2.5], [NAN, -1.0], [-5.0, -9.0], [NAN, NAN], [NAN, NAN]]),
    )
    run = jax.jit(lambda config, g: OBJECTIVE.advantages(config, g, OBJECTIVE.shape(config, g), ()))
    got, state, counters = run(CRPG(), groups)
    a, b, c = (x - 1.3 / 3 for x in (0.8, 0.5, 0.0))
    np.testing.assert_allclose(got, [[a, a], [0, b], [c, c], [0, 0], [0, 0]], rtol=1e-5)
    np.testing.assert_allclose(counters["bounded_reward"], 1.3 / 3, rtol=1e-6)
    assert state == ()
    # limit 4: 0.5, 0.5, 0
    np.testing.assert_allclose(run(CRPG(kl_limit=4.0), groups)[2]["bounded_reward"], 1 / 3, rtol=1e-6)
    nothing = run(CRPG(), groups.replace(valid=jnp.zeros(5, bool)))
    np.testing.assert_array_equal(nothing[0], 0)
    assert float(nothing[2]["bounded_reward"]) == 0


def test_a_negative_reward_does_not_pay_for_leaving_the_reference():
    # Log-ratios 0, 5 and 0, limit 10. By the formula -1 at a log-ratio of 5 would be -0.5, better than -1 at 0.
    reward = jnp.array([-1.0, -1.0, 1.0])
    groups = Groups(
        reward=reward, outcome=reward, valid=jnp.ones(3, bool), group=jnp.arange(3, dtype=jnp.int32),
        action_mask=jnp.ones((3, 1), bool), finish=jnp.zeros(3, jnp.int8), num_groups=3, max_completion=1,
        old_logprobs=jnp.array([[-6.0], [-1.0], [-1.0]]), ref_logprobs=jnp.array([[-6.0], [-6.0], [-1.0]]),
    )  # fmt: skip
    found, _, counters = OBJECTIVE.advantages(CRPG(), groups, reward, ())
    np.testing.assert_allclose(found, [[-1 / 3], [-1 / 3], [2 / 3]], rtol=1e-6)
    assert int(counters["negative_rewards"]) == 2


def test_what_it_needs_and_refuses():
    needs = OBJECTIVE.needs(CRPG())
    assert needs.reference and needs.credit_logprobs and not needs.entropy_gradient
    assert OBJECTIVE.needs(CRPG(entropy_bonus=0.1)).entropy_gradient
    with pytest.raises(ValueError, match=r"CRPG\.kl_limit = 0\.0 must be above 0"):
        OBJECTIVE.check(CRPG(kl_limit=0.0), FACTS)
    with pytest.raises(ValueError, match=r"CRPG takes one update a batch, got updates_per_batch=2"):
        OBJECTIVE.check(CRPG(), FACTS._replace(updates_per_batch=2))
