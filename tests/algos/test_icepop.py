"""IcePop by hand through its row."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import loss_of, tokens

from jrl.algos import ALGOS
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts
from jrl.algos.grpo import GRPO
from jrl.algos.icepop import IcePop

OBJECTIVE = ALGOS["IcePop"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_the_loss_by_hand():
    # w = [0.3, 1, 6] on [0.5, 5]: only the second learns, and as in GRPO (not times w); the entropy bonus goes likewise
    old = np.array([-3.0, -3.0, -3.0])
    batch = tokens(old + 0.1, old, [1, 1, 1], behaviour=old - np.log([0.3, 1, 6]))
    loss, metrics, gradient = loss_of(OBJECTIVE, IcePop(), batch)
    np.testing.assert_allclose(loss, [0, -1.1051709, 0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, -1.1051709, 0], rtol=1e-6)
    np.testing.assert_array_equal(metrics["rejected"], [1, 0, 1])
    np.testing.assert_allclose(loss_of(OBJECTIVE, IcePop(entropy_bonus=0.5), batch)[0], [0, -1.6051709, 0], rtol=1e-6)


def test_the_rejected_stay_in_the_denominator():
    # the row's reduction sees the loss mask alone: three tokens, one rejected, still a mean over three
    mask = jnp.ones((1, 3), bool)
    weights, denominator = OBJECTIVE.weights(IcePop(), mask, 3), OBJECTIVE.denominator(IcePop(), mask, 1, 3)
    old = np.array([-3.0, -3.0, -3.0])
    loss, _, _ = loss_of(OBJECTIVE, IcePop(), tokens(old, old, [1, 1, 1], behaviour=old - np.log([0.3, 1, 1])))
    np.testing.assert_allclose((weights[0] * loss).sum() / denominator, -2 / 3, rtol=1e-6)


def test_where_sampler_and_learner_agree_it_is_grpo():
    batch = tokens([-0.5, -1.9, -1], [-1, -1.4, -1.1], [1, -1, 0.3])
    expected, _ = ALGOS["GRPO"].token_loss(GRPO(), batch, ())
    np.testing.assert_array_equal(loss_of(OBJECTIVE, IcePop(), batch)[0], expected)


def test_advantages_are_those_of_grpo():
    groups = sample_groups()
    found, _, _ = OBJECTIVE.advantages(IcePop(), groups, groups.reward, ())
    expected, _, _ = ALGOS["GRPO"].advantages(ALGOS["GRPO"].config(), groups, groups.reward, ())
    np.testing.assert_array_equal(found, expected)


def test_the_step_is_a_mean_over_sequences():
    # rows of 1 and 3 tokens: weights 1 and 1/3 over 2 sequences, whatever their lengths
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_allclose(OBJECTIVE.weights(IcePop(), mask, 3), [[1, 0, 0], [1 / 3] * 3], rtol=1e-6)
    assert OBJECTIVE.denominator(IcePop(), mask, 8, 3) == 2


@pytest.mark.parametrize(
    "config, message",
    [
        (IcePop(clip_low=1.0), r"IcePop\.clip_low = 1\.0"),
        (IcePop(clip_high=-0.1), r"IcePop\.clip_high = -0\.1"),
        (IcePop(low=1.2), r"low = 1\.2 to high = 5\.0"),
        (IcePop(low=-0.1), r"low = -0\.1"),
        (IcePop(high=1.0), r"high = 1\.0"),
    ],
)
def test_illegal_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)


def test_one_sample_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 2 of them, got samples=1"):
        OBJECTIVE.check(IcePop(), FACTS._replace(samples=1))


def test_a_run_stops_where_more_than_half_of_the_tokens_are_rejected():
    stop = lambda share, **options: OBJECTIVE.stop(IcePop(**options), {"rejected": share})
    assert stop(0.5) is None and stop(0.9, most_rejected=None) is None and stop(0.1) is None
    assert OBJECTIVE.stop(IcePop(), {"loss": 1.0}) is None  # the critic's step has other metrics
    assert stop(None) is None  # a step that learned from no token
    assert stop(0.51).startswith("51% of the tokens were rejected, more than IcePop.most_rejected = 0.5: ")
    assert stop(0.51, most_rejected=0.6) is None
    assert "top-k, top-p and min-p" in stop(0.51)  # at top-k of 2 and lag 0, 99% were rejected at the first step
    masked = ALGOS["MaskedGRPO"]
    assert "MaskedGRPO.most_rejected = 0.5" in masked.stop(masked.config(), {"rejected": 0.51})
    for share in (0.0, 1.0, -0.5):
        with pytest.raises(ValueError, match=rf"IcePop\.most_rejected = {share} is a share"):
            OBJECTIVE.check(IcePop(most_rejected=share), FACTS)
