"""A-3PO by hand through its row; and no pass over the batch is made for its old log-probs."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import loss_of, tokens, two_stored_answers

from jrl.algos import ALGOS
from jrl.algos.a3po import A3PO
from jrl.algos.contract import Facts, Needs, recomputes_logprobs
from jrl.algos.decoupled_ppo import DecoupledPPO
from jrl.learning.learner import ModelOutputs, token_terms
from jrl.models.decoder import MODEL
from jrl.resolve import load_config
from jrl.run.programs import forward_passes
from jrl.types import Recomputed

OBJECTIVE = ALGOS["A3PO"]
FACTS = Facts(samples=4, lag=2, updates_per_batch=2, truncated_sampling=False, greedy=False, max_completion=3)


def aged(staleness, **fields):
    """Returns tokens of log-prob -0.9 that were drawn at -1.2, with advantage 1."""
    count = len(staleness)
    batch = tokens([-0.9] * count, [-9] * count, [1] * count, behaviour=[-1.2] * count)
    return batch.replace(old_logprobs=None, staleness=jnp.int32(staleness), **fields)


def test_the_loss_by_hand():
    # u = 0: prox = behaviour = -1.2, weight 1, ratio exp(0.3) cut to 1.2: -1.2, and no gradient.
    # u = 1: prox = -1.2 + 0.3 / 2 = -1.05, weight exp(0.15), ratio exp(0.15): -exp(0.3) = -1.3498588, its own gradient.
    # u = 2: prox = -1.2 + 0.3 * 2 / 3 = -1, weight exp(0.2), ratio exp(0.1): -exp(0.3) as well.
    loss, metrics, gradient = loss_of(OBJECTIVE, A3PO(), aged([0, 1, 2]))
    np.testing.assert_allclose(loss, [-1.2, -1.3498588, -1.3498588], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, -1.3498588, -1.3498588], rtol=1e-6)
    np.testing.assert_allclose(metrics["importance_weight"], [1, np.exp(0.15), np.exp(0.2)], rtol=1e-6)
    np.testing.assert_array_equal(metrics["clip_fraction_high"], [1, 0, 0])
    assert not any(name.startswith("mismatch") for name in metrics)


def test_the_clip_of_an_older_token_by_hand():
    # u = 1: prox -1.05, ratio exp(0.15) = 1.1618 cut to 1.1: -exp(0.15) * 1.1 = -1.2780176, and no gradient.
    # u = 2: prox -1, ratio exp(0.1) = 1.1052 cut to 1.1: -exp(0.2) * 1.1 = -1.3435430.
    # u = 5: prox -1.2 + 0.3 * 5 / 6 = -0.95, ratio exp(0.05) within: -exp(0.3) = -1.3498588.
    loss, _, gradient = loss_of(OBJECTIVE, A3PO(clip_high=0.1), aged([1, 2, 5]))
    np.testing.assert_allclose(loss, [-1.2780176, -1.3435430, -1.3498588], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, 0, -1.3498588], rtol=1e-6)


def test_it_is_decoupled_ppo_around_the_interpolated_policy():
    batch = aged([0, 1, 5], advantages=jnp.float32([-1, 1, 0.3]))
    given = batch.replace(old_logprobs=jnp.float32([-1.2, -1.05, -0.95]))  # -1.2 + 0.3 * u / (u + 1)
    for cap in (2.0, 1.1):
        expected, _ = ALGOS["DecoupledPPO"].token_loss(DecoupledPPO(cap=cap), given, ())
        np.testing.assert_allclose(loss_of(OBJECTIVE, A3PO(cap=cap), batch)[0], expected, rtol=1e-6)


def test_masked_tokens_may_hold_anything():
    batch = aged([1, 1], mask=jnp.array([True, False]))
    batch = batch.replace(behaviour_logprobs=jnp.float32([-1.2, jnp.nan]), staleness=jnp.int32([1, -1]))
    loss, _, gradient = loss_of(OBJECTIVE, A3PO(), batch)
    np.testing.assert_allclose(loss[0], -1.3498588, rtol=1e-6)
    assert np.isfinite(loss).all() and gradient[1] == 0


def test_no_pass_over_the_batch_is_made_for_old_log_probs():
    needs = OBJECTIVE.needs(A3PO())
    assert needs.staleness and not needs.old_logprobs
    assert not recomputes_logprobs(needs, 4)
    assert not recomputes_logprobs(Needs(), 1) and recomputes_logprobs(Needs(), 2)
    assert recomputes_logprobs(needs._replace(credit_logprobs=True), 1)  # a KL in the reward reads them
    assert not recomputes_logprobs(Needs(logprobs=False, credit_logprobs=True), 2)
    config, parts = load_config("configs/algos/a3po.gin")
    passes = lambda objective: forward_passes(
        dataclasses.replace(config.stages[-1], objective=objective),
        config,
        parts.tables,
        ALGOS[type(objective).__name__],
        MODEL,
        None,
    )
    assert passes(A3PO()) == {} and list(passes(DecoupledPPO())) == ["recompute"]


def test_what_credit_has_recomputed_does_not_reach_the_loss():
    """Of a batch with old log-probs the loss sees none, and its age."""
    batch = two_stored_answers(np.zeros((2, 1)), 3)
    ones = jnp.ones(batch.loss_mask.shape)
    batch = batch.replace(
        recomputed=Recomputed(old_logprobs=ones), advantages=ones, staleness=batch.loss_mask.astype(jnp.int32),
        packed=batch.packed.replace(behaviour_logprobs=-ones),
    )  # fmt: skip
    seen = []
    row = OBJECTIVE._replace(token_loss=lambda config, tokens, state: (seen.append(tokens), (ones, {}))[1])
    token_terms(ModelOutputs(-ones, ones, None, None, None, None), batch, A3PO(), (), row)
    assert seen[0].old_logprobs is None
    np.testing.assert_array_equal(seen[0].staleness, batch.loss_mask)


def test_a_truncated_sampler_is_refused():
    with pytest.raises(ValueError, match="A3PO puts its clip around the sampler's log-probs"):
        OBJECTIVE.check(A3PO(), FACTS._replace(truncated_sampling=True))


def test_its_options_are_those_of_decoupled_ppo():
    assert dataclasses.asdict(A3PO()) == dataclasses.asdict(DecoupledPPO())
    assert OBJECTIVE.corrects_staleness(A3PO())
    with pytest.raises(ValueError, match=r"A3PO\.cap = 0\.0 must be above 0"):
        OBJECTIVE.check(A3PO(cap=0.0), FACTS)
    with pytest.raises(ValueError, match="at least 2 of them, got samples=1"):
        OBJECTIVE.check(A3PO(), FACTS._replace(samples=1))
