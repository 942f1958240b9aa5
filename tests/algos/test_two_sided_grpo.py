from __future__ import annotations

import numpy as np
import pytest
from small_batches import loss_of, tokens

from jrl.algos import ALGOS
from jrl.algos.common import TruncatedImportance
from jrl.algos.contract import Facts
from jrl.algos.two_sided_grpo import TwoSidedGRPO

OBJECTIVE = ALGOS["TwoSidedGRPO"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=2)


def test_a_large_ratio_of_a_bad_token_counts_as_delta():
    # Ratios 9 and 3 with A = -1: the first counts as 4, without a gradient. Ratio 9 with A = 1: PPO's clip at 1.2.
    batch = tokens(np.log([9.0, 3.0, 9.0]), [0.0] * 3, [-1.0, -1.0, 1.0])
    loss, _, gradient = loss_of(OBJECTIVE, TwoSidedGRPO(), batch)
    np.testing.assert_allclose(loss, [4, 3, -1.2], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, 3, 0], rtol=1e-6)


def test_weights_of_stale_tokens_multiply_the_loss():
    batch = tokens([0.0], [0.0], [1.0], behaviour=[np.log(0.5)])
    loss, metrics, _ = loss_of(OBJECTIVE, TwoSidedGRPO(importance=TruncatedImportance(cap=5.0)), batch)
    np.testing.assert_allclose(loss, [-2], rtol=1e-6)
    np.testing.assert_allclose(metrics["importance_weight"], [2], rtol=1e-6)


def test_a_delta_that_the_clip_makes_useless_is_refused():
    with pytest.raises(ValueError, match=r"TwoSidedGRPO\.delta = 1\.2 must exceed 1 \+ clip_high = 1\.2"):
        OBJECTIVE.check(TwoSidedGRPO(delta=1.2), FACTS)
    OBJECTIVE.check(TwoSidedGRPO(), FACTS)
