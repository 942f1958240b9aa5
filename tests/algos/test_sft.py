from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.algos import ALGOS
from jrl.algos.contract import Facts, Needs, Tokens
from jrl.algos.sft import SFT
from jrl.ops.categorical import logprob_and_entropy

OBJECTIVE = ALGOS["SFT"]


def tokens(logprobs, mask):
    logprobs = jnp.asarray(logprobs, jnp.float32)
    return Tokens(
        logprobs=logprobs,
        old_logprobs=logprobs,
        behaviour_logprobs=None,
        ref_logprobs=None,
        entropy=jnp.ones_like(logprobs),
        advantages=None,
        mask=jnp.asarray(mask),
        segment=jnp.zeros(logprobs.shape, jnp.int32),
        num_segments=1,
    )


def total(logprobs, mask):
    """Returns the loss of a step with these tokens."""
    batch = tokens(logprobs, mask)
    loss, _ = OBJECTIVE.token_loss(SFT(), batch, ())
    weights = OBJECTIVE.weights(SFT(), batch.mask, 3)
    return jnp.where(batch.mask, weights * loss, 0).sum() / OBJECTIVE.denominator(SFT(), batch.mask, 2, 3)


LOGPROBS = jnp.array([[-1.0, -2.0, -0.5], [-3.0, -4.0, -9.0]])
MASK = jnp.array([[False, True, True], [True, True, False]])


def test_the_loss_is_the_mean_surprise_of_the_tokens():
    # (2 + 0.5 + 3 + 4) / 4 = 2.375
    np.testing.assert_allclose(jax.jit(total)(LOGPROBS, MASK), 2.375, rtol=1e-6)
    loss, metrics = OBJECTIVE.token_loss(SFT(), tokens(LOGPROBS, MASK), ())
    np.testing.assert_array_equal(loss, [[0, 2, 0.5], [3, 4, 0]])
    assert metrics == {}


def test_every_token_is_pulled_alike():
    np.testing.assert_allclose(jax.grad(total)(LOGPROBS, MASK), jnp.where(MASK, -0.25, 0), rtol=1e-6)


def test_nothing_under_the_mask_gets_through():
    poisoned = jnp.where(MASK, LOGPROBS, jnp.nan)
    np.testing.assert_allclose(total(poisoned, MASK), 2.375, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(total)(poisoned, MASK), jnp.where(MASK, -0.25, 0), rtol=1e-6)


def test_it_is_the_cross_entropy_of_the_given_tokens():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)), jnp.float32)
    given = jnp.array([0, 3, 1, 4])
    logprobs, _ = logprob_and_entropy(logits, given, jnp.float32(1))
    expected = -jnp.mean(jnp.log(jax.nn.softmax(logits))[jnp.arange(4), given])
    np.testing.assert_allclose(total(logprobs[None], jnp.ones((1, 4), bool)), expected, rtol=1e-6)


def test_it_learns_from_stored_rows_and_needs_nothing_else():
    assert OBJECTIVE.advantages is None and OBJECTIVE.sequence_loss is None and OBJECTIVE.unit_size == 1
    assert OBJECTIVE.needs(SFT()) == Needs()
    assert OBJECTIVE.init_state(SFT()) == ()
    facts = Facts(samples=1, lag=0, updates_per_batch=4, truncated_sampling=True, greedy=True, max_completion=8)
    OBJECTIVE.check(SFT(), facts)  # how completions are sampled is nothing to it
