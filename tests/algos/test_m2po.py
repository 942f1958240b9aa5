"""M2PO by hand through its row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import loss_of, tokens

from jrl.algos import ALGOS
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts
from jrl.algos.grpo import GRPO
from jrl.algos.m2po import M2PO

OBJECTIVE = ALGOS["M2PO"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_tokens_far_from_the_sampler_get_no_advantage():
    # of the row's two tokens one is 1 nat off: the mean of [1, 0] is 0.5, without it 0
    groups = sample_groups()
    zeros = jnp.zeros_like(groups.old_logprobs)
    off = jnp.where(groups.action_mask, zeros.at[0, 2].set(1.0), jnp.nan)
    groups = groups.replace(old_logprobs=zeros, behaviour_logprobs=off)
    plain, _, _ = ALGOS["GRPO"].advantages(GRPO(), groups, groups.reward, ())
    count = int((groups.action_mask & groups.valid[:, None]).sum())
    assert plain[0, 2] != 0
    fn = jax.jit(lambda config: OBJECTIVE.advantages(config, groups, groups.reward, ()))
    found, _, counters = fn(M2PO(limit=0.9 / count))
    np.testing.assert_array_equal(found, plain.at[0, 2].set(0))
    np.testing.assert_allclose(counters["rejected"], 1 / count, rtol=1e-6)
    found, _, counters = fn(M2PO(limit=1.1 / count))
    np.testing.assert_array_equal(found, plain)
    assert counters["rejected"] == 0


def test_rows_that_are_out_of_the_loss_are_in_no_mean():
    groups = sample_groups()  # row 10 has no verdict
    old = jnp.zeros_like(groups.old_logprobs)
    groups = groups.replace(old_logprobs=old, behaviour_logprobs=old.at[10].set(9.0))
    _, _, counters = OBJECTIVE.advantages(M2PO(), groups, groups.reward, ())
    assert counters["rejected"] == 0


def test_the_loss_is_that_of_grpo():
    batch = tokens([-0.5, -1.9, -1], [-1, -1.4, -1.1], [1, -1, 0.3])
    expected, _ = ALGOS["GRPO"].token_loss(GRPO(), batch, ())
    np.testing.assert_array_equal(loss_of(OBJECTIVE, M2PO(), batch)[0], expected)
    assert OBJECTIVE.needs(M2PO()).credit_logprobs


def test_the_step_is_a_mean_over_tokens():
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_array_equal(OBJECTIVE.weights(M2PO(), mask, 3), mask)
    assert OBJECTIVE.denominator(M2PO(), mask, 8, 3) == 4


@pytest.mark.parametrize(
    "config, message",
    [
        (M2PO(clip_low=1.0), r"M2PO\.clip_low = 1\.0"),
        (M2PO(clip_high=-0.1), r"M2PO\.clip_high = -0\.1"),
        (M2PO(limit=0.0), r"M2PO\.limit = 0\.0 must be above 0"),
    ],
)
def test_illegal_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)


def test_one_sample_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 2 of them, got samples=1"):
        OBJECTIVE.check(M2PO(), FACTS._replace(samples=1))
