"""KL-Cov by hand through its row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import counted, covariances, loss_of, plain, tokens

from jrl.algos import ALGOS
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts
from jrl.algos.kl_cov import KLCov

OBJECTIVE = ALGOS["KLCov"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_the_tokens_of_largest_covariance_are_selected():
    groups = sample_groups()
    cov, mask = covariances(groups), counted(groups)
    count = int(0.1 * mask.sum())
    selected = jax.jit(lambda config: OBJECTIVE.select(config, groups, plain(groups)))(KLCov(share=0.1))
    largest = np.argsort(np.where(mask, -cov, np.inf).reshape(-1))[:count]
    np.testing.assert_array_equal(np.flatnonzero(selected), np.sort(largest))
    assert not np.any(OBJECTIVE.select(KLCov(), groups, plain(groups)))  # a share of 2e-4 of so few is none


def test_the_loss_by_hand():
    # d = [0.2, -0.2, 0.5], A = 1, the first two selected: -exp(0.2) + 0.5 * 0.2, -exp(-0.2) + 0.5 * 0.2, -exp(0.5):
    # nothing is clipped
    batch = tokens([-0.8, -1.2, -0.5], [-1, -1, -1], [1, 1, 1]).replace(selected=jnp.array([True, True, False]))
    loss, metrics, gradient = loss_of(OBJECTIVE, KLCov(coefficient=0.5), batch)
    np.testing.assert_allclose(loss, [-1.1214028, -0.7187308, -1.6487213], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.7214028, -1.3187308, -1.6487213], rtol=1e-6)
    np.testing.assert_array_equal(metrics["held"], [1, 1, 0])
    assert OBJECTIVE.needs(KLCov()).credit_logprobs


def test_the_step_is_a_mean_over_tokens():
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_array_equal(OBJECTIVE.weights(KLCov(), mask, 3), mask)
    assert OBJECTIVE.denominator(KLCov(), mask, 8, 3) == 4


@pytest.mark.parametrize(
    "config, message",
    [
        (KLCov(share=1.0), r"KLCov\.share = 1\.0 must lie in \(0, 1\)"),
        (KLCov(coefficient=0.0), r"KLCov\.coefficient = 0\.0 must be above 0"),
    ],
)
def test_illegal_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)


def test_one_sample_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 2 of them, got samples=1"):
        OBJECTIVE.check(KLCov(), FACTS._replace(samples=1))
