"""What surrounds an update, by hand: places of packed tokens, what a minibatch counts, and what a step leaves."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_learner as learning

from jrl.algos import ALGOS
from jrl.algos.contract import Needs, Objective, Pairs
from jrl.learning.credit import Credit, credit, finish_sampled, kept_rows, targets_of
from jrl.learning.layout import Learner, more_than_asked, packed_shape
from jrl.learning.learner import KLLimit, ModelOutputs, close_step, mean_metrics, token_terms
from jrl.learning.pack import pack_rollout, unpack
from jrl.learning.step import Learned, Minibatch, learn_from_sampled, updates
from jrl.types import ModelState, PackedBatch, Recomputed, TrainBatch, TrainState

GRPO = ALGOS["GRPO"]
JUDGED = dict(num_groups=learning.B, max_completion=learning.C)


def takes_all(**needs):
    """An objective that keeps every row, without counters."""
    return Objective(
        config=GRPO.config,
        needs=lambda config: Needs(**needs),
        keep=lambda config, groups: jnp.ones_like(groups.valid),
        advantages=lambda config, groups, reward, state: (jnp.zeros(groups.action_mask.shape), state, {}),
    )


def test_packed_tokens_keep_their_columns_and_padding_holds_nothing():
    rollout, _ = learning.sequences()
    lengths = np.where(np.arange(learning.N) < 4, 0, rollout.length)  # the first prompt is padding
    rollout = rollout.replace(length=lengths, truncated_logprobs=rollout.sampler_logprobs - 1)
    plan = learning.planned(rollout, Learner(row_length=32), 1)
    packed = jax.jit(pack_rollout)(rollout, plan, jnp.float32(1))
    inside = np.arange(learning.T) < lengths[:, None]
    columns = np.broadcast_to(np.arange(learning.T), inside.shape)
    back = lambda x: np.asarray(unpack(x, plan.source, learning.T, learning.N))
    np.testing.assert_array_equal(back(packed.positions), np.where(inside, columns, 0))
    np.testing.assert_array_equal(back(packed.behaviour_logprobs), np.where(inside, rollout.truncated_logprobs, 0))
    np.testing.assert_array_equal(back(packed.sampler_logprobs), np.where(inside, rollout.sampler_logprobs, 0))
    for field in (packed.positions, packed.tokens, packed.action_mask, packed.behaviour_logprobs):
        assert not np.asarray(field)[plan.source < 0].any()
    np.testing.assert_array_equal(plan.member, lengths > 0)


def test_what_rewards_say_of_a_token_is_packed_into_the_place_of_the_token():
    rollout, _ = learning.sequences()
    plan = learning.planned(rollout, Learner(row_length=32, minibatches=2), 1, minibatch=1)
    numbers = iter(np.random.default_rng(0).normal(size=(3, learning.N, learning.T)))
    by_row = {
        "advantages": next(numbers), "loss_weights": next(numbers), "returns": next(numbers),
        "loss_mask": rollout.action_mask, "selected": rollout.tokens % 2 == 1,
    }  # fmt: skip
    by_row = {name: jnp.asarray(x) for name, x in by_row.items()}
    batch = finish_sampled(
        pack_rollout(rollout, plan, jnp.float32(1)), Recomputed(), plan, Credit(state=(), metrics={}, **by_row), None,
        objective=takes_all(), max_completion=learning.C,
    )  # fmt: skip
    inside = plan.member[:, None] & (np.arange(learning.T) < rollout.length[:, None])
    assert 0 < plan.member.sum() < learning.N
    for name, x in by_row.items():
        back = unpack(getattr(batch, name), plan.source, learning.T, learning.N)
        np.testing.assert_array_equal(back, np.where(inside, x, 0), name)


def token_batch(old_logprobs):
    """Returns one micro-batch of a row with three tokens, the last of them masked. Each of its log-probs differs."""
    mask = np.array([[True, True, False]])
    packed = PackedBatch(
        tokens=None, positions=None, segment=np.zeros((1, 3), np.int32), shared_prefix=None, prefix_row=None,
        action_mask=None, behaviour_logprobs=np.full((1, 3), -5.0), sampler_logprobs=np.full((1, 3), -6.0),
        sequence=np.zeros((1, 1), np.int32), temperature=None, num_real=None,
    )  # fmt: skip
    return TrainBatch(
        packed=packed, recomputed=Recomputed(old_logprobs=old_logprobs), loss_mask=mask,
        loss_weights=np.array([[1.0, 0.5, 0.0]]), advantages=None, returns=None, targets=None, denominator=None,
    )  # fmt: skip


NOW = np.array([[-1.0, -2.0, -3.0]])
OLD_LOSS = Objective(config=GRPO.config, token_loss=lambda config, tokens, state: (tokens.old_logprobs, {}))


def old_terms(now, old):
    outputs = ModelOutputs(now, None, None, None, None, None)
    return token_terms(outputs, token_batch(old), None, (), OLD_LOSS)[0]


def test_old_log_probs_are_those_of_before_the_updates_or_of_now_without_a_gradient():
    # 1 * -1.5 and 0.5 * -2.5; without recomputed ones 1 * -1 and 0.5 * -2
    np.testing.assert_array_equal(old_terms(NOW, NOW - 0.5), [[-1.5, -1.25, 0]])
    np.testing.assert_array_equal(old_terms(NOW, None), [[-1, -1, 0]])
    np.testing.assert_array_equal(jax.grad(lambda now: old_terms(now, None).sum())(jnp.asarray(NOW)), 0)


def test_the_loss_of_a_masked_token_may_be_anything():
    # In numpy: XLA makes a choice of a product with a mask, so that NaN * 0 does not show under jit.
    np.testing.assert_array_equal(old_terms(NOW, np.array([[-1.5, -2.5, np.nan]])), [[-1.5, -1.25, 0]])


def test_a_minibatch_is_divided_by_its_own_rows():
    rollout, scores = learning.sequences()
    hyper = GRPO.config()

    @jax.jit
    def denominator(rollout, scores, plan):
        found = credit(rollout, scores, (), hyper, objective=GRPO, **JUDGED)
        packed = pack_rollout(rollout, plan, jnp.float32(1))
        static = dict(objective=GRPO, max_completion=learning.C)
        return finish_sampled(packed, Recomputed(), plan, found, hyper, **static).denominator, found.loss_mask

    rows = []
    for minibatch in range(2):
        plan = learning.planned(rollout, Learner(row_length=32, minibatches=2), 1, minibatch)
        found, mask = denominator(rollout, scores, plan)
        rows.append((np.asarray(mask).any(1) & plan.member).sum())
        assert found == rows[-1]
    assert sum(rows) == np.asarray(mask).any(1).sum() and min(rows) > 0


def test_rows_without_a_verdict_and_tokens_of_older_weights_are_left_out():
    rollout, scores = learning.sequences()
    assert not scores.valid.all()
    version = np.where(rollout.action_mask, np.arange(learning.T) % 2, -1).astype(np.int32)
    rollout = rollout.replace(version=version)
    judged = dict(objective=takes_all(), **JUDGED)
    found = credit(rollout, scores, (), None, version=jnp.int32(1), newest_only=True, **judged)
    np.testing.assert_array_equal(found.loss_mask, (version == 1) & scores.valid[:, None])
    # Weights are 0 off the mask, whatever the objective gives there: NaN times a loss of 0 is NaN in its gradient.
    judged["objective"] = takes_all()._replace(weights=lambda config, mask, longest: jnp.where(mask, 2.0, jnp.nan))
    weighted = credit(rollout, scores, (), None, version=jnp.int32(1), newest_only=True, **judged)
    np.testing.assert_array_equal(weighted.loss_weights, np.where(found.loss_mask, 2, 0))
    every = credit(rollout, scores, (), None, version=jnp.int32(1), **judged)
    np.testing.assert_array_equal(every.loss_mask, rollout.action_mask & scores.valid[:, None])
    np.testing.assert_array_equal(kept_rows(rollout, scores, None, **judged), scores.valid)


def test_an_empty_place_is_of_no_comparison():
    rollout, _ = learning.sequences()
    plan = learning.planned(rollout, Learner(row_length=32), 1)
    packed = pack_rollout(rollout, jax.tree.map(jnp.asarray, plan), jnp.float32(1))
    number = np.arange(learning.N)
    pairs = Pairs(label=number % 2.0, unit=number // 2, weight=np.ones(learning.N, np.float32))
    targets = targets_of(packed, jnp.ones(learning.N, bool), jax.tree.map(jnp.asarray, pairs), None, takes_all())
    places = np.asarray(packed.sequence)
    assert (places == learning.N).any()
    np.testing.assert_array_equal(targets.unit, np.append(number // 2, -1)[places])
    np.testing.assert_array_equal(targets.counts, places < learning.N)


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_step_moves_the_objectives_state_where_no_update_was_skipped(skipped):
    number = lambda x: jnp.int32(x)
    models = {role: ModelState({"w": jnp.ones(2)}, None, {}, None, number(4)) for role in ("policy", "judge")}
    state = TrainState(number(7), models, {"baseline": jnp.float32(0.5)}, jax.random.key(0), number(3 + skipped))
    moving = Objective(
        config=GRPO.config, next_state=lambda config, state, metrics: {"baseline": state["baseline"] + 1}
    )
    after = close_step(
        state, None, {"baseline": jnp.float32(2)}, {}, None, number(3), roles=("policy",), objective=moving
    )
    assert after.objective["baseline"] == (0.5 if skipped else 3)
    assert (after.step, after.models["policy"].version, after.models["judge"].version) == (8, 5, 4)


@pytest.mark.parametrize("decay, at_due", [(None, 3.0), (0.9, 1.2)])
def test_a_reference_becomes_the_policy_or_moves_towards_it(decay, at_due):
    # 0.9 * 1 + 0.1 * 3 = 1.2, after every second step; between them it stays.
    close = jax.jit(functools.partial(close_step, roles=("policy",), objective=takes_all(), reset_reference_every=2))
    for version, expected in ((0, 1.0), (1, at_due), (2, 1.0)):
        own, old = (ModelState({"w": jnp.full(2, x)}, None, {}, None, jnp.int32(version)) for x in (3.0, 1.0))
        zero = jnp.int32(0)
        state = TrainState(zero, {"policy": own, "reference": old}, (), jax.random.key(0), zero)
        after = close(state, None, (), {}, None, zero, None if decay is None else jnp.float32(decay))
        np.testing.assert_allclose(after.models["reference"].params["w"], expected, rtol=1e-6)
        np.testing.assert_array_equal(after.models["policy"].params["w"], 3)


@pytest.mark.parametrize("warms_up", [False, True])
@pytest.mark.parametrize("has_critic", [False, True])
def test_every_epoch_updates_by_every_minibatch_in_order(warms_up, has_critic):
    """The state is a list of what was done to it: each update adds its role and its minibatch."""
    arrays = SimpleNamespace(
        objective="objective", optimizer="policy's", critic_optimizer="critic's", router="router", kl_limit=None
    )

    def update(role, optimizer):
        def apply(state, batch, *given):
            assert given == ("objective", optimizer, "router", *((None,) if role == "policy" else ()))
            assert batch.pretraining is (None if role == "critic" else "imitated")
            return [*state, (role, batch.packed.tokens)], {role: len(state)}

        return apply

    update_critic = update("critic", "critic's") if has_critic else None
    programs = SimpleNamespace(update=update("policy", "policy's"), update_critic=update_critic)
    empty = dict.fromkeys(PackedBatch.__dataclass_fields__)
    batches = [TrainBatch(PackedBatch(**{**empty, "tokens": i}), *[None] * 7, pretraining="imitated") for i in range(3)]
    state, metrics, of_critic = updates(programs, [], Learned(batches, 2, warms_up), arrays)
    roles = ["policy"] * (not warms_up) + ["critic"] * has_critic
    assert state == [(role, i) for _ in range(2) for i in range(3) for role in roles]
    of = lambda role: [{role: at} for at, (updated, _) in enumerate(state) if updated == role]
    assert (metrics, of_critic) == (of("policy"), of("critic"))


@pytest.mark.parametrize("epochs, minibatches", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_old_log_probs_are_given_up_where_there_is_one_update(epochs, minibatches):
    """Then they are those of now, and the ratio is exactly 1."""
    given, updated = [], []
    policy = ModelState({}, None, {}, None, jnp.int32(0))
    state = SimpleNamespace(models={"policy": policy}, objective=(), skipped=jnp.int32(0))
    programs = SimpleNamespace(
        credit=lambda *arrays: Credit(None, None, None, (), {}),
        finish=lambda packed, recomputed, *rest: given.append(recomputed.old_logprobs),
        copy=lambda arrays: arrays,
        update=lambda state, *arrays: updated.append(1) or (state, {}),
        update_critic=None,
        mean=lambda *metrics: {},
        close=lambda state, *arrays: state,
    )
    none = dict.fromkeys(("objective", "shaping", "optimizer", "router", "reference_decay", "kl_limit"))
    arrays = SimpleNamespace(**none)
    old = jnp.zeros((2, 3))
    each = Minibatch(SimpleNamespace(source=None), None, Recomputed(old_logprobs=old))
    static = dict(role="policy", epochs=epochs, warms_up=False)
    learn_from_sampled(programs, state, [each] * minibatches, None, None, arrays, **static)
    assert len(updated) == epochs * minibatches
    assert given == [None] if len(updated) == 1 else all(x is old for x in given) and len(given) == minibatches


def test_an_update_after_the_kl_limit_is_told_so_and_the_next_step_begins_anew():
    found, given = iter([0, 0, 1, 1]), []

    def update(state, batch, objective, optimizer, router, kl_limit):
        given.append(kl_limit)
        return state, {"update/kl_reached": next(found)}

    batches = [TrainBatch(PackedBatch(**dict.fromkeys(PackedBatch.__dataclass_fields__)), *[None] * 7)] * 2
    arrays = SimpleNamespace(
        objective=None, optimizer=None, router=None, critic_optimizer=None, kl_limit=KLLimit(0.01, 0.0)
    )
    critic = lambda state, batch, *given: (state, {})
    updates(SimpleNamespace(update=update, update_critic=critic), (), Learned(batches, 2, False), arrays)
    assert given == [(0.01, 0.0), (0.01, 0), (0.01, 0), (0.01, 1)]
    assert arrays.kl_limit == (0.01, 0.0)


def test_means_of_updates_are_over_their_tokens():
    update = lambda tokens, loss, skipped: {
        "update/tokens": jnp.float32(tokens),
        "loss": jnp.float32(loss),
        "update/skipped_nonfinite": jnp.float32(skipped),
    }
    # (1 * 1 + 3 * 5 + 0 * 100) / 4
    found = mean_metrics([update(1, 1, 0), update(3, 5, 1), update(0, 100, 1)])
    assert {name: float(value) for name, value in found.items()} == {
        "update/tokens": 4, "loss": 4, "update/skipped_nonfinite": 2
    }  # fmt: skip


def test_micro_batches_that_cannot_be_as_small_as_asked_are_noted():
    # Rows for sequences of 100 tokens have 128: one on each of 4 shards makes 512 tokens.
    note = lambda asked: more_than_asked(packed_shape(Learner(micro_batch_tokens=asked), 16, 100, 4), Learner(
        micro_batch_tokens=asked))  # fmt: skip
    assert note(300) == (
        " (a row on each of 4 batch shards, 512 tokens at once, are more than Learner.micro_batch_tokens = 300)"
    )
    assert note(512) == note(4096) == ""
