from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.contract import Facts, Groups
from jrl.algos.crpg import CRPG

OBJECTIVE = ALGOS["CRPG"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=2)
NAN = float("nan")


def groups(**fields):
    """Three prompts, the first sample of each its greedy answer: three samples of the first; a row without a verdict
    and one without a token of the second; of the third, the greedy answer has no verdict."""
    found = Groups(
        reward=jnp.array([0.5, 1.5, 0.5, 1.5, 0.0, NAN, 9.0, NAN, 1.0]),
        outcome=jnp.zeros(9),
        valid=jnp.array([True, True, True, True, True, False, True, False, True]),
        group=jnp.array([0, 0, 0, 0, 1, 1, 1, 2, 2], jnp.int32),
        sample=jnp.array([0, 1, 2, 3, 0, 1, 2, 0, 1], jnp.int32),
        action_mask=jnp.array([[True, True]] * 6 + [[False, False]] + [[True, True]] * 2),
        finish=jnp.zeros(9, jnp.int8),
        num_groups=3,
        max_completion=2,
        feasible=jnp.array([False, True, True, False, True, False, True, True, True]),
        # Log-ratios of the first prompt's rows 0, 2, 12 and 0.
        old_logprobs=jnp.array([[-1.0, -1.0], [-1.0, -2.0], [-1.0, -1.0], [-1.0, -1.0], *[[-1.0, -1.0]] * 5]),
        ref_logprobs=jnp.array([[-1.0, -1.0], [-2.5, -2.5], [-5.0, -9.0], [-1.0, -1.0], *[[-1.0, -1.0]] * 5]),
    )
    return found.replace(**fields)


RUN = jax.jit(lambda config, g: OBJECTIVE.advantages(config, g, OBJECTIVE.shape(config, g), ()))


def test_the_advantage_is_the_calibrated_and_bounded_reward_less_the_mean_of_the_batch():
    # Against the greedy answer's 0.5: sigmoid(1) = 0.73106 times 1 - 2 / 10, 0.5 times 0, and 0 where not feasible:
    # 0.58485, 0, 0, mean 0.19495. Greedy answers, and prompts without one that was judged, do not count.
    got, state, counters = RUN(CRPG(), groups())
    a, b = 0.58485 - 0.19495, -0.19495
    np.testing.assert_allclose(got, [[0, 0], [a, a], [b, b], [b, b], *[[0, 0]] * 5], atol=1e-5)
    np.testing.assert_allclose(counters["bounded_reward"], 0.19495, atol=1e-5)
    assert state == () and int(counters["infeasible"]) == 1
    np.testing.assert_array_equal(OBJECTIVE.keep(CRPG(), groups()), [False, True, True, True, *[False] * 5])
    # limit 24: 0.73106 (1 - 2 / 24), 0.5 (1 - 12 / 24), 0
    found = RUN(CRPG(kl_limit=24.0), groups())[2]["bounded_reward"]
    np.testing.assert_allclose(found, (0.67014 + 0.25) / 3, atol=1e-5)


def test_without_constraints_every_row_is_feasible():
    found = RUN(CRPG(), groups(feasible=None))[2]
    np.testing.assert_allclose(found["bounded_reward"], (0.58485 + 0 + 0.73106) / 3, atol=1e-5)
    assert int(found["infeasible"]) == 0


def test_a_batch_without_a_verdict_has_no_advantage():
    nothing = RUN(CRPG(), groups(valid=jnp.zeros(9, bool)))
    np.testing.assert_array_equal(nothing[0], 0)
    assert float(nothing[2]["bounded_reward"]) == 0


def test_a_negative_reward_does_not_pay_for_leaving_the_reference():
    # All rewards -1: Rc is 0.5, and the row that is 5 nats likelier than under the reference keeps half of that.
    rows = groups(
        reward=jnp.full(9, -1.0), feasible=None, old_logprobs=jnp.full((9, 2), -1.0).at[1, 0].set(4.0),
        ref_logprobs=jnp.full((9, 2), -1.0),
    )  # fmt: skip
    found = RUN(CRPG(), rows)[0]
    assert float(found[1, 0]) < 0 < float(found[2, 0])
    np.testing.assert_allclose(found[2] - found[1], 0.25, rtol=1e-6)


def test_what_it_needs_and_refuses():
    needs = OBJECTIVE.needs(CRPG())
    assert needs.reference and needs.credit_logprobs and needs.greedy_sample and not needs.entropy_gradient
    assert OBJECTIVE.needs(CRPG(entropy_bonus=0.1)).entropy_gradient
    with pytest.raises(ValueError, match=r"CRPG\.kl_limit = 0\.0 must be above 0"):
        OBJECTIVE.check(CRPG(kl_limit=0.0), FACTS)
    with pytest.raises(ValueError, match=r"CRPG takes one update a batch, got updates_per_batch=2"):
        OBJECTIVE.check(CRPG(), FACTS._replace(updates_per_batch=2))
    with pytest.raises(ValueError, match=r"set Constraints\.infeasible_reward = None"):
        OBJECTIVE.check(CRPG(), FACTS._replace(replaces_infeasible=True))
    with pytest.raises(ValueError, match=r"at least 2 of them, got samples=1"):
        OBJECTIVE.check(CRPG(), FACTS._replace(samples=1))
