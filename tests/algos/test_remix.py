from __future__ import annotations

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


def test_illegal_combinations_are_refused():
    with pytest.raises(ValueError, match=r"ReMix\.clip = 0\.0"):
        OBJECTIVE.check(ReMix(clip=0.0), FACTS)
    with pytest.raises(ValueError, match="top-k, top-p and min-p cut"):
        OBJECTIVE.check(ReMix(), FACTS._replace(truncated_sampling=True))
