from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import loss_of, tokens

from jrl.algos import ALGOS
from jrl.algos.contract import Facts
from jrl.algos.remix import ReMix

OBJECTIVE = ALGOS["ReMix"]
FACTS = Facts(samples=4, lag=1, updates_per_batch=2, truncated_sampling=False, greedy=False, max_completion=2)


def test_the_clip_is_around_where_the_update_begins():
    # The learner gave 3 times what the sampler did, so that c = 3: a ratio of 3.1 is free, 3.5 is cut to 3.2, and where
    # A < 0 2.5 to 2.8.
    batch = tokens(np.log([3.1, 3.5, 2.5]), np.log([3.0] * 3), [1.0, 1.0, -1.0], behaviour=[0.0] * 3)
    loss, _, gradient = loss_of(OBJECTIVE, ReMix(), batch)
    np.testing.assert_allclose(loss, [-3.1, -3.2, 2.8], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-3.1, 0, 0], rtol=1e-6)


def test_on_its_own_samples_it_is_the_clip_of_ppo():
    loss, _, _ = loss_of(OBJECTIVE, ReMix(), tokens(np.log([1.5, 1.1]), [0.0, 0.0], [1.0, 1.0]))
    np.testing.assert_allclose(loss, [-1.2, -1.1], rtol=1e-6)


def test_the_kl_is_to_the_reference_and_to_the_policy_before_by_a_share_that_moves():
    # d = log 2 to the reference: k2 = 0.693147^2 / 2 = 0.240227; log 4 to the policy before: 1.386294^2 / 2 = 0.960906.
    # Up to step 50 the first alone, at step 75 0.7 and 0.3 of them: 0.168159 + 0.288272 = 0.456431. Gradients: d.
    batch = tokens(np.log([0.5, 0.5]), np.log([0.125, 0.125]), [0.0, 0.0])
    batch = batch.replace(ref_logprobs=jnp.log(jnp.array([0.25, jnp.nan])), mask=jnp.array([True, False]))
    for step, expected, slope in ((0, 0.240227, 0.693147), (75, 0.456431, 0.7 * 0.693147 + 0.3 * 1.386294)):
        loss, metrics, gradient = loss_of(OBJECTIVE, ReMix(kl=0.1), batch, jnp.int32(step))
        np.testing.assert_allclose(loss, [0.1 * expected, 0], rtol=1e-5)
        np.testing.assert_allclose(gradient, [0.1 * slope, 0], rtol=1e-5)
        np.testing.assert_allclose(metrics["kl_mixed"], [expected, 0], rtol=1e-5)
    assert OBJECTIVE.needs(ReMix(kl=0.1)).reference and not OBJECTIVE.needs(ReMix()).reference
    state = OBJECTIVE.init_state(ReMix(kl=0.1))
    assert [int(state), int(OBJECTIVE.next_state(ReMix(kl=0.1), state, {}))] == [0, 1]
    assert OBJECTIVE.next_state(ReMix(), OBJECTIVE.init_state(ReMix()), {}) == ()


def test_illegal_combinations_are_refused():
    with pytest.raises(ValueError, match=r"ReMix\.kl = 0\.0 must be above 0"):
        OBJECTIVE.check(ReMix(kl=0.0), FACTS)
    with pytest.raises(ValueError, match=r"ReMix\.clip = 0\.0"):
        OBJECTIVE.check(ReMix(clip=0.0), FACTS)
    with pytest.raises(ValueError, match="top-k, top-p and min-p cut"):
        OBJECTIVE.check(ReMix(), FACTS._replace(truncated_sampling=True))
