"""Clip-Cov by hand through its row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import counted, covariances, loss_of, plain, tokens

from jrl.algos import ALGOS
from jrl.algos.clip_cov import ClipCov
from jrl.algos.common import token_draws
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts
from jrl.algos.grpo import GRPO

OBJECTIVE = ALGOS["ClipCov"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_a_share_of_the_tokens_between_the_limits_is_taken_out():
    groups = sample_groups()
    cov, mask = covariances(groups), counted(groups)
    within = mask & (cov > 0.1) & (cov < 0.5)
    count = int(0.1 * mask.sum())
    assert within.sum() > count > 1
    config, drawn = ClipCov(share=0.1, low=0.1, high=0.5), []
    for draw in range(4):
        state = {"draws": jnp.int32(draw)}
        found, after, counters = OBJECTIVE.advantages(config, groups, groups.reward, state)
        dropped = mask & (np.asarray(found) != np.asarray(plain(groups)))
        assert np.all(within[dropped]) and dropped.sum() == count and np.all(np.asarray(found)[dropped] == 0)
        np.testing.assert_allclose(counters["dropped"], count / mask.sum(), rtol=1e-6)
        assert int(after["draws"]) == draw + 1
        drawn.append(tuple(np.flatnonzero(dropped)))
    assert len(set(drawn)) > 1  # another draw, other tokens


def test_a_draw_is_named_by_step_prompt_sample_and_column():
    groups = sample_groups()
    bits = token_draws(groups, jnp.int32(3))
    order = np.random.default_rng(0).permutation(12)
    shuffled = token_draws(jax.tree.map(lambda x: x[order], groups), jnp.int32(3))
    np.testing.assert_array_equal(shuffled, bits[order])
    assert len(np.unique(bits)) == bits.size
    assert not np.any(token_draws(groups, jnp.int32(4)) == bits)


def test_the_loss_is_that_of_grpo():
    batch = tokens([-0.5, -1.9, -1], [-1, -1.4, -1.1], [1, -1, 0.3])
    expected, _ = ALGOS["GRPO"].token_loss(GRPO(), batch, ())
    np.testing.assert_array_equal(loss_of(OBJECTIVE, ClipCov(), batch)[0], expected)
    assert OBJECTIVE.needs(ClipCov()).credit_logprobs


def test_the_step_is_a_mean_over_tokens():
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_array_equal(OBJECTIVE.weights(ClipCov(), mask, 3), mask)
    assert OBJECTIVE.denominator(ClipCov(), mask, 8, 3) == 4


@pytest.mark.parametrize(
    "config, message",
    [
        (ClipCov(share=0.0), r"ClipCov\.share = 0\.0 must lie in \(0, 1\)"),
        (ClipCov(low=5.0), r"ClipCov\.low = 5\.0 must be below ClipCov\.high = 5\.0"),
        (ClipCov(clip_high=-0.1), r"ClipCov\.clip_high = -0\.1"),
    ],
)
def test_illegal_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)


def test_one_sample_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 2 of them, got samples=1"):
        OBJECTIVE.check(ClipCov(), FACTS._replace(samples=1))
