"""80/20 by hand through its row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import counted, loss_of, plain, tokens

from jrl.algos import ALGOS
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts
from jrl.algos.high_entropy_tokens import HighEntropyTokens

OBJECTIVE = ALGOS["HighEntropyTokens"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_only_the_tokens_of_high_entropy_have_an_advantage():
    groups = sample_groups()
    mask, entropy = counted(groups), np.asarray(groups.old_entropy)
    selected = mask & (entropy >= np.quantile(entropy[mask], 0.7))
    fn = jax.jit(lambda config: OBJECTIVE.advantages(config, groups, groups.reward, ()))
    found, _, counters = fn(HighEntropyTokens(share=0.3))
    np.testing.assert_array_equal(found, np.where(selected, plain(groups), 0))
    np.testing.assert_allclose(counters["selected"], selected.sum() / mask.sum(), rtol=1e-6)
    np.testing.assert_allclose(counters["selected_entropy"], entropy[selected].mean(), rtol=1e-6)


def test_with_all_tokens_it_is_grpo_and_rows_out_of_the_loss_are_not_ranked():
    groups = sample_groups()  # row 10 has no verdict
    found, _, counters = OBJECTIVE.advantages(HighEntropyTokens(share=1.0), groups, groups.reward, ())
    np.testing.assert_array_equal(found, plain(groups))
    assert counters["selected"] == 1
    loud = groups.replace(old_entropy=groups.old_entropy.at[10].set(9.0))
    few = [OBJECTIVE.advantages(HighEntropyTokens(), g, g.reward, ())[0] for g in (groups, loud)]
    np.testing.assert_array_equal(*few)
    assert OBJECTIVE.needs(HighEntropyTokens()).credit_entropy


def test_the_loss_is_the_clip_of_dapo():
    # rho = 1.5 at A = 1: clipped at 1.28; rho = 0.5 at A = -1: at 0.8
    old = np.array([-1.0, -1.0])
    loss, _, gradient = loss_of(OBJECTIVE, HighEntropyTokens(), tokens(old + np.log([1.5, 0.5]), old, [1, -1]))
    np.testing.assert_allclose(loss, [-1.28, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(gradient, 0)


def test_the_step_is_a_mean_over_tokens():
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_array_equal(OBJECTIVE.weights(HighEntropyTokens(), mask, 3), mask)
    assert OBJECTIVE.denominator(HighEntropyTokens(), mask, 8, 3) == 4


@pytest.mark.parametrize(
    "config, message",
    [
        (HighEntropyTokens(share=0.0), r"HighEntropyTokens\.share = 0\.0 must lie in \(0, 1\]"),
        (HighEntropyTokens(share=1.1), r"share = 1\.1"),
        (HighEntropyTokens(clip_low=1.0), r"HighEntropyTokens\.clip_low = 1\.0"),
    ],
)
def test_illegal_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)


def test_one_sample_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 2 of them, got samples=1"):
        OBJECTIVE.check(HighEntropyTokens(), FACTS._replace(samples=1))
