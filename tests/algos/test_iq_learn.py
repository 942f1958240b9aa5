"""IQLearn by hand, and the values of states that it reads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import tokens

from jrl.algos import ALGOS
from jrl.algos.contract import Facts
from jrl.algos.iq_learn import IQLearn
from jrl.ops.logprobs import state_values, token_logprobs

ROW = ALGOS["IQLearn"]
FACTS = Facts(samples=1, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=8)
# Q = [2, 0] and action 0, then Q = [1, 1]: V = log(e^2 + 1) = 2.126928, V' = log 2e = 1.693147
LOGPROBS, VALUES = [2 - 2.126928, -0.693147], [2.126928, 1.693147]


def of(batch, config):
    return jax.jit(ROW.token_loss)(config, batch, ())


def test_by_hand():
    batch = tokens(LOGPROBS, [0.0] * 2, [0.0] * 2).replace(state_values=jnp.float32(VALUES))
    loss, metrics = of(batch, IQLearn(weight=0.5))
    # 0.126928 + 0.5 (2 - 1.693147)^2 = 0.17401; the last one's next state is worth 0: 0.693147 + 0.5 * 1^2
    np.testing.assert_allclose(loss, [0.17401, 1.193147], rtol=1e-4)
    np.testing.assert_allclose(metrics["iq_learn/implied_reward"], [0.306853, 1.0], rtol=1e-5)
    halved, _ = of(batch, IQLearn(weight=0.5, discount=0.5))
    np.testing.assert_allclose(halved[0], 0.126928 + 0.5 * (2 - 0.8465735) ** 2, rtol=1e-5)
    np.testing.assert_allclose(of(batch, IQLearn(weight=1e-9))[0], -np.array(LOGPROBS), rtol=1e-5)  # SFT


def test_the_next_state_is_of_the_same_sequence_and_learned():
    batch = tokens(LOGPROBS, [0.0] * 2, [0.0] * 2, segment=[0, 1]).replace(state_values=jnp.float32(VALUES))
    np.testing.assert_allclose(of(batch, IQLearn(weight=0.5))[0][0], 0.126928 + 0.5 * 4, rtol=1e-5)
    cut = tokens([LOGPROBS[0], np.nan], [0.0] * 2, [0.0] * 2)
    cut = cut.replace(state_values=jnp.float32([VALUES[0], np.nan]), mask=jnp.array([True, False]))
    np.testing.assert_allclose(of(cut, IQLearn(weight=0.5))[0], [0.126928 + 0.5 * 4, 0], rtol=1e-5)
    total = lambda x: ROW.token_loss(IQLearn(), cut.replace(logprobs=x, state_values=x), ())[0].sum()
    assert np.isfinite(jax.grad(total)(cut.logprobs)).all()
    # A masked token implies no reward, although the state after it has a value.
    prompt = tokens(LOGPROBS, [0.0] * 2, [0.0] * 2).replace(state_values=jnp.float32(VALUES))
    loss, metrics = of(prompt.replace(mask=jnp.array([False, True])), IQLearn(weight=0.5))
    np.testing.assert_allclose(metrics["iq_learn/implied_reward"], [0, 1.0], rtol=1e-5)
    np.testing.assert_allclose(loss, [0, 1.193147], rtol=1e-5)


def test_the_gradient_is_that_of_small_differences_through_both_values():
    with jax.enable_x64(True):
        batch = tokens([-1.0, -2.0, -0.5], [0.0] * 3, [0.0] * 3)
        start = jnp.array([-1.0, -2.0, -0.5, 2.0, 1.0, 0.7], jnp.float64)
        total = lambda x: ROW.token_loss(IQLearn(), batch.replace(logprobs=x[:3], state_values=x[3:]), ())[0].sum()
        step = 1e-6 * jnp.eye(6, dtype=jnp.float64)
        numeric = [(total(start + s) - total(start - s)) / 2e-6 for s in step]
        np.testing.assert_allclose(jax.grad(total)(start), numeric, atol=1e-8)


def test_a_states_value_is_the_log_sum_of_its_logits_in_the_column_of_its_token():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        hidden, matrix = jnp.asarray(rng.normal(size=(2, 5, 3))), jnp.asarray(rng.normal(size=(3, 7)))
        mask = jnp.array([[False, True, True, False, True], [False, False, True, True, True]])
        chosen = jnp.asarray(rng.integers(0, 7, (2, 5)), jnp.int32)
        static = dict(temperature=jnp.float64(0.5), chunk=2)
        unembed = lambda h: h @ matrix
        values = state_values(hidden, mask, unembed, **static)
        logits = (hidden @ matrix)[:, :-1] / 0.5
        expected = jnp.where(mask[:, 1:], jax.nn.logsumexp(logits, axis=-1), 0)
        np.testing.assert_allclose(values[:, 1:], expected, atol=1e-12)
        # with the log-prob it is the logit
        logprobs, _ = token_logprobs(hidden, chosen, mask, unembed, **static)
        q = jnp.take_along_axis(logits, chosen[:, 1:, None], axis=-1)[..., 0]
        np.testing.assert_allclose((values + logprobs)[:, 1:], jnp.where(mask[:, 1:], q, 0), atol=1e-12)


@pytest.mark.parametrize("fields, message", [({"weight": 0.0}, "weight = 0.0"), ({"discount": 1.5}, "discount = 1.5")])
def test_what_makes_no_sense_is_refused(fields, message):
    ROW.check(IQLearn(), FACTS)
    with pytest.raises(ValueError, match=rf"IQLearn\.{message}"):
        ROW.check(IQLearn(**fields), FACTS)
