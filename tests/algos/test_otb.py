"""OTB: returns of tokens against the baseline of least variance."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.contract import Facts, Groups
from jrl.algos.otb import OTB
from jrl.ops.logprobs import squared_probabilities

NAN = jnp.nan
OBJECTIVE = ALGOS["OTB"]
FACTS = Facts(samples=2, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def answers(token_reward=None):
    """Two samples of a prompt from column 1 on, one without a verdict, one without a token; what is masked is NaN."""
    mask = jnp.array([[False, True, True], [False, True, True], [False, True, True], [False] * 3])
    reward = jnp.array([1.0, 0.0, NAN, 7.0])
    on_actions = lambda rows: jnp.where(mask, jnp.pad(jnp.array(rows), ((0, 2), (0, 0)), constant_values=NAN), NAN)
    return Groups(
        reward=reward,
        outcome=reward,
        valid=~jnp.isnan(reward),
        group=jnp.zeros(4, jnp.int32),
        action_mask=mask,
        finish=jnp.zeros(4, jnp.int8),
        num_groups=1,
        max_completion=2,
        token_reward=token_reward,
        old_logprobs=on_actions(jnp.log(jnp.array([[NAN, 0.5, 0.4], [NAN, 0.8, 0.2]]))),
        ref_logprobs=on_actions(jnp.log(jnp.array([[NAN, 0.5, 0.2], [NAN, 0.8, 0.2]]))),
        old_sum_squared=on_actions([[NAN, 0.5, 0.3], [NAN, 0.7, 0.5]]),
    )


def credited(config, groups):
    run = jax.jit(lambda config, g: OBJECTIVE.advantages(config, g, OBJECTIVE.shape(config, g), ()))
    found, state, counters = run(config, groups)
    assert state == () and int(counters["unscorable"]) == 1 and int(counters["aborted"]) == 1
    np.testing.assert_array_equal(found[2:], 0)
    return np.asarray(found[:2])


def test_the_baseline_is_of_a_token_by_hand():
    # 1 - 2 p + sum p^2: [0.5, 0.5] and [0.1, 1.1]; summed so far: W = [0.5, 1.0] and [0.1, 1.2].
    # b = [0.5 / 0.6, 1 / 2.2]; returns are 1 on each token of the first row and 0 on those of the second.
    found = credited(OTB(), answers())
    np.testing.assert_allclose(found, [[0, 1 / 6, 6 / 11], [0, -5 / 6, -5 / 11]], rtol=1e-5)


def test_returns_hold_the_rewards_of_later_tokens_alone():
    # The first row's are 0.5 and 0: returns 1.5 and 1, b = [0.75 / 0.6, 1 / 2.2].
    rewards = jnp.zeros((4, 3)).at[0, 1].set(0.5).at[2].set(NAN)
    found = credited(OTB(), answers(rewards))
    np.testing.assert_allclose(found, [[0, 0.25, 6 / 11], [0, -1.25, -5 / 11]], rtol=1e-5)


def test_the_kl_is_in_the_reward():
    # k1 of the first row's last token is log 2, all others are 0: returns 1 - 0.1 log 2 there.
    left = 1 - 0.1 * np.log(2)
    found = credited(OTB(kl_in_reward=0.1), answers())
    expected = left * np.array([[0, 1 / 6, 6 / 11], [0, -5 / 6, -5 / 11]])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_it_reads_of_the_weights_before_the_updates():
    needs = OBJECTIVE.needs(OTB())
    assert needs.credit_logprobs and needs.credit_sum_squared and needs.token_rewards and not needs.reference
    assert OBJECTIVE.needs(OTB(kl_in_reward=0.1)).reference


def test_squared_probabilities_by_hand():
    # Hidden states are logits. Of log 3 and 0: p = 3/4 and 1/4, 9/16 + 1/16; at temperature 1/2 p = 9/10 and 1/10.
    # Column t speaks of the state before it, in chunks of 2; what is masked may be NaN.
    hidden = jnp.array([[[jnp.log(3.0), 0], [0, 0], [-500, 500], [NAN, NAN]]])
    mask = jnp.array([[False, True, True, True]])
    at = lambda temperature, mask: jax.jit(
        lambda h, m: squared_probabilities(h, m, lambda x: x, temperature=jnp.float32(temperature), chunk=2)
    )(hidden, mask)
    np.testing.assert_allclose(at(1, mask), [[0, 0.625, 0.5, 1]], rtol=1e-6)
    np.testing.assert_allclose(at(0.5, mask.at[0, 2].set(False)), [[0, 0.82, 0, 1]], rtol=1e-6)
    past = jnp.roll(hidden, 1, axis=1)  # now NaN is before column 1, and is not asked for
    alone = squared_probabilities(past, mask.at[0, 1].set(False), lambda x: x, temperature=jnp.ones(()), chunk=4)
    np.testing.assert_allclose(alone, [[0, 0, 0.625, 0.5]], rtol=1e-6)


def test_tokens_weigh_alike():
    mask = jnp.array([[True, False, False], [True, True, True], [False] * 3])
    np.testing.assert_array_equal(OBJECTIVE.weights(OTB(), mask, 3), mask)
    assert OBJECTIVE.denominator(OTB(), mask, 3, 3) == 4


def test_a_kl_of_nothing_is_refused():
    OBJECTIVE.check(OTB(), FACTS)
    with pytest.raises(ValueError, match=r"OTB\.kl_in_reward = 0\.0"):
        OBJECTIVE.check(OTB(kl_in_reward=0.0), FACTS)
