from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import rows_with_values

from jrl.algos import ALGOS, ppo
from jrl.algos.conformance import sample_tokens
from jrl.algos.contract import Facts
from jrl.algos.dreamer_ppo import DreamerPPO
from jrl.learning.critic import begin_critic, of_critic
from jrl.models.heads import REWARD, VALUE, fresh_heads, read_values
from jrl.ops import two_hot
from jrl.types import ModelState

OBJECTIVE = ALGOS["DreamerPPO"]
FACTS = Facts(samples=1, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=4)


def many_rows(scale):
    """Ten times the rows of `rows_with_values`, so that there are 50 returns, with rewards of a scale."""
    rows = rows_with_values()
    many = jax.tree.map(lambda x: jnp.concatenate([x] * 10), rows)
    return many.replace(reward=many.reward * scale, num_groups=4)


def test_advantages_are_divided_by_the_range_of_returns_where_that_exceeds_1():
    config, begun = DreamerPPO(gae_lambda=1.0), OBJECTIVE.init_state(DreamerPPO())
    run = jax.jit(lambda g, s: OBJECTIVE.advantages(config, g, g.reward, s))
    small, large = many_rows(1.0), many_rows(40.0)
    plain = lambda g: ppo.estimates(config, g, g.reward)[0]
    found, state, counters = run(small, begun)
    np.testing.assert_array_equal(found, plain(small))  # returns of 0 and 1: a range of 1
    assert counters["percentile_range"] == pytest.approx(1) and state["high"] == pytest.approx(1)
    # Returns of 0 and 40: the range moves a hundredth of the way, from 1 to 1.39.
    found, state, counters = run(large, state)
    assert counters["percentile_range"] == pytest.approx(1.39, rel=1e-5)
    np.testing.assert_allclose(found, plain(large) / 1.39, rtol=1e-5)


def test_the_value_loss_is_the_cross_entropy_of_two_neighboring_bins():
    # Bins -1, 0, 1; a return of e^0.25 - 1 is 0.25 on their scale: weights 0.75 and 0.25. Log-probs -2, -0.5, -1.2
    # (up to a constant that the softmax takes out) give 0.75 * 0.5 + 0.25 * 1.2 + log sum.
    config = DreamerPPO(bins=3, symlog_limit=1)
    logits = np.array([-2.0, -0.5, -1.2])
    tokens = sample_tokens()
    tokens = tokens.replace(
        returns=jnp.full_like(tokens.returns, np.expm1(0.25)),
        value_logits=jnp.broadcast_to(jnp.array(logits, jnp.float32), (*tokens.mask.shape, 3)),
    )
    expected = 0.75 * 0.5 + 0.25 * 1.2 + np.log(np.exp(logits).sum())
    wrong, metrics = jax.jit(OBJECTIVE.value_loss)(config, tokens, ())
    np.testing.assert_allclose(wrong, np.where(tokens.mask, expected, 0), rtol=1e-6)
    assert not metrics["value/out_of_range"].any()
    both = OBJECTIVE.token_loss(config, tokens, ())[0]
    alone = OBJECTIVE.token_loss(config, tokens.replace(values=None, value_logits=None), ())[0]
    np.testing.assert_allclose(both - alone, 0.1 * wrong, rtol=1e-5, atol=1e-7)


def test_a_head_of_bins_begins_at_0_and_is_read_before_every_token():
    config = DreamerPPO(bins=5, symlog_limit=2)
    needs = OBJECTIVE.needs(config)
    assert needs.values and needs.value_outputs == 5
    head = fresh_heads((VALUE, REWARD), jax.random.key(0), 4, "float32", outputs={VALUE: 5})
    assert head[VALUE].shape == (1, 4, 5) and head[REWARD].shape == (1, 4, 1)
    hidden = jnp.arange(12.0).reshape(1, 3, 4)
    bins = two_hot.bins_of(*needs.value_bins)
    np.testing.assert_array_equal(bins, [-2, -1, 0, 1, 2])
    values = two_hot.two_hot_value(read_values(head[VALUE], hidden), bins=bins)
    np.testing.assert_allclose(values, [[0, 0, 0]], atol=1e-6)
    w = jnp.zeros((1, 4, 5)).at[0, 0, 4].set(1.0)
    np.testing.assert_array_equal(read_values(w, hidden)[0, :, 4], [0, 0, 4])  # column t by hidden state t - 1
    assert of_critic(OBJECTIVE).needs(config).value_bins == needs.value_bins


def test_a_critic_takes_a_head_that_fits_and_stands_on_frozen_weights():
    state = lambda outputs: ModelState({}, None, {VALUE: jnp.ones((1, 4, outputs))}, None, jnp.int32(7))
    zeros = lambda: jnp.zeros((1, 4, 5))
    critic = begin_critic(state(5), "policy", zeros, 5)
    assert critic.heads[VALUE].all() and critic.version == 0 and critic.shares is None
    assert not begin_critic(state(1), "policy", zeros, 5).heads[VALUE].any()
    # The reward model's head where there is no value head, and zeros where there is none at all.
    assert begin_critic(state(5).replace(heads={REWARD: jnp.ones((1, 4, 5))}), "policy", zeros, 5).heads[VALUE].all()
    assert not begin_critic(state(5).replace(heads={}), "policy", zeros, 5).heads[VALUE].any()
    # Adapters: of a role with frozen weights of its own, or of one that stands on another's.
    for adapters in ({"frozen": {}}, {"shares": "policy"}):
        critic = begin_critic(state(5).replace(**adapters), "policy", zeros, 5)
        assert (critic.frozen, critic.shares) == (None, "policy")


@pytest.mark.parametrize(
    "bad, message",
    [({"value_clip": 0.2}, r"DreamerPPO\.value_clip = 0\.2"), ({"bins": 1}, "at least 2 bins"),
     ({"percentile_decay": 1.0}, r"DreamerPPO\.percentile_decay = 1\.0"), ({"discount": 0.0}, r"DreamerPPO\.discount")],
)  # fmt: skip
def test_illegal_values_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(DreamerPPO(**bad), FACTS)
    OBJECTIVE.check(DreamerPPO(), FACTS)
