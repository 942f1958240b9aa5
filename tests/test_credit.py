"""What objectives are given to take credit of: log-probs by row, rewards of tokens, components of the reward."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_learner as learning

from jrl.algos import ALGOS
from jrl.algos.contract import Groups, Needs, Objective
from jrl.algos.reward_shaping import Constraints, Shaping
from jrl.device.sharding import MeshShape, batch_sharding, make_mesh, replicated, row_sharding, row_shards
from jrl.learning import learner
from jrl.learning.credit import credit, finish_sampled, hacking_metrics, kept_rows
from jrl.learning.layout import Learner
from jrl.learning.pack import pack_rollout, unpack
from jrl.models.decoder import MODEL
from jrl.types import Finish, Recomputed

RECOMPUTED = ("old_values", "old_logprobs", "old_entropy", "old_sum_squared")
CONFIG = ALGOS["PPO"].config()
TEMPERATURE = 0.8
NAN = float("nan")
FIELDS = ("values", "old_logprobs", "behaviour_logprobs", "ref_logprobs", "old_entropy", "old_sum_squared",
          "token_reward")  # fmt: skip


def shown(config, groups, reward, state):
    """Advantages of an objective that tells what it was given."""
    found = {name: getattr(groups, name) for name in FIELDS if getattr(groups, name) is not None}
    found |= {f"component/{name}": value for name, value in (groups.components or {}).items()}
    return jnp.zeros(groups.action_mask.shape), state, found


def probe(**needs):
    return Objective(config=type(CONFIG), advantages=shown, needs=lambda config: Needs(**needs))


EVERYTHING = probe(values=True, reference=True, credit_logprobs=True, credit_entropy=True, credit_sum_squared=True)


def given(mesh_shape, config, dtype="float32", objective=EVERYTHING):
    """Returns what an objective is given, {name: numpy}."""
    mesh, weights, _ = learning.program(mesh_shape, dataclasses.replace(config, minibatches=1), "PPO", dtype, None)
    rollout, scores = learning.sequences(dtype=np.dtype(dtype))
    mark = np.arange(rollout.tokens.size, dtype=dtype).reshape(rollout.tokens.shape)
    scores = scores.replace(
        token_reward=np.where(rollout.action_mask, mark, 0),
        components={"Exact": scores.reward, "Length": np.full_like(scores.reward, np.nan)},
    )
    static = dict(model=MODEL, cfg=learning.model_config(dtype), chunk=config.chunk)

    @jax.jit
    def run(weights, rollout, scores, plans):
        other = weights._replace(params=jax.tree.map(lambda x: 0.5 * x, weights.params))
        before = []
        for plan in plans:
            packed = pack_rollout(rollout, plan, jnp.asarray(TEMPERATURE, dtype))
            found = learner.recompute(weights, packed, fields=RECOMPUTED, **static)
            reference = learner.logprobs(other, packed, **static)
            before.append((Recomputed(**found, ref_logprobs=reference), plan.source))
        judged = dict(objective=objective, num_groups=learning.B, max_completion=learning.C)
        return credit(rollout, scores, (), CONFIG, before, **judged).metrics

    with jax.set_mesh(mesh):
        put = lambda x: jax.device_put(x, batch_sharding(mesh, x.ndim) if x.ndim else replicated(mesh))
        rows = row_sharding(mesh)
        place = lambda x: jax.device_put(x, rows if np.ndim(x) == 3 else replicated(mesh))
        plans = [
            jax.tree.map(place, learning.planned(rollout, config, row_shards(mesh), k))
            for k in range(config.minibatches)
        ]
        found = run(weights, *jax.tree.map(put, (rollout, scores)), plans)
    return {name.removeprefix("advantage/"): np.asarray(value) for name, value in found.items()}


ALONE = Learner(row_length=learning.T)
LAYOUTS = {
    **{name: learning.LAYOUTS[name] for name in ("packed, micro-batches", "shared prompts on all axes")},
    "minibatches": (MeshShape(data=2), Learner(row_length=32, minibatches=4)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_credit_is_taken_of_does_not_depend_on_layout(layout):
    """In float64, told in float32: what layouts add up in another order rounds to the same number, or its neighbour."""
    with jax.enable_x64(True):
        found, other = (given(*of, dtype="float64") for of in ((MeshShape(), ALONE), LAYOUTS[layout]))
    for name in FIELDS:
        assert np.abs(found[name]).max() > 0.1
        np.testing.assert_allclose(other[name], found[name], rtol=1.2e-7, err_msg=name)


def test_what_is_known_of_tokens_lies_on_the_shards_of_their_rows():
    """On every device, advantages, weights and mask of 8,192 rows of 16,384 tokens would take 1.1 GiB."""
    mesh = make_mesh(MeshShape(data=2), jax.devices()[:2])
    static = dict(version=jnp.int32(1), objective=ALGOS["GRPO"], num_groups=learning.B, max_completion=learning.C)
    with jax.set_mesh(mesh):
        place = lambda x: jax.device_put(x, batch_sharding(mesh, x.ndim) if x.ndim else replicated(mesh))
        placed = jax.tree.map(place, learning.sequences())
        found = jax.eval_shape(lambda given: credit(*given, (), ALGOS["GRPO"].config(), **static), placed)
    by_token = [x for x in jax.tree.leaves(found) if x.ndim == 2]
    assert len(by_token) == 3
    assert {tuple(x.sharding.spec) for x in by_token} == {(("data", "fsdp"), None)}


def test_a_denominator_may_compare_any_rows_of_a_mesh():
    """Here the longest rows, which a sharded array cannot be sorted for."""
    longest = lambda config, mask, rows, width: jnp.sort(mask.sum(-1))[-4:].sum()
    objective, mesh = ALGOS["GRPO"]._replace(denominator=longest), make_mesh(MeshShape(data=2), jax.devices()[:2])
    rollout, scores = learning.sequences()
    judged = dict(objective=objective, max_completion=learning.C)

    def denominator(rollout, scores, plan):
        found = credit(rollout, scores, (), objective.config(), num_groups=learning.B, **judged)
        packed = pack_rollout(rollout, plan, jnp.float32(1))
        return finish_sampled(packed, Recomputed(), plan, found, objective.config(), **judged).denominator

    with jax.set_mesh(mesh):
        place = lambda x: jax.device_put(x, batch_sharding(mesh, x.ndim) if x.ndim else replicated(mesh))
        of_plan = lambda x: jax.device_put(x, row_sharding(mesh) if np.ndim(x) == 3 else replicated(mesh))
        plan = jax.tree.map(of_plan, learning.planned(rollout, Learner(row_length=32), row_shards(mesh)))
        found = jax.jit(denominator)(*jax.tree.map(place, (rollout, scores)), plan)
    actions = (rollout.action_mask & scores.valid[:, None]).sum(-1)
    assert found == np.sort(actions)[-4:].sum()


@pytest.mark.parametrize("name", ["OnlineDPO", "OnlineIPO", "CODPO", "PRO"])
def test_a_step_whose_comparisons_all_lost_a_side_learns_nothing(name):
    """So that its update is skipped (O8), and weights do not decay for it."""
    rollout, scores = learning.sequences()
    reward = np.random.default_rng(0).permutation(learning.N).astype(np.float32)
    scores = scores.replace(reward=reward, valid=np.ones(learning.N, bool))
    best = reward == np.array([reward[rollout.group == g].max() for g in rollout.group])
    version = np.where(rollout.action_mask, np.where(best, 0, 1)[:, None], -1).astype(np.int32)
    rollout, row = rollout.replace(version=version), ALGOS[name]
    static = dict(version=jnp.int32(1), objective=row, num_groups=learning.B, max_completion=learning.C)
    whole, cut = (credit(rollout, scores, (), row.config(), newest_only=newest, **static) for newest in (False, True))
    assert whole.loss_mask.any() and whole.metrics["loss/rows"] > 0
    assert not cut.loss_mask.any() and cut.metrics["loss/rows"] == 0


def test_old_and_reference_log_probs_are_those_of_rows_alone_and_behaviour_is_the_samplers():
    """In float64, where only a wrong place could differ."""
    with jax.enable_x64(True):
        found = given(*LAYOUTS["packed, micro-batches"], dtype="float64")
        mesh, weights, _ = learning.program(MeshShape(), Learner(), "PPO", "float64", None)
        rollout, _ = learning.sequences(dtype=np.float64)
        cfg = learning.model_config("float64")

        @jax.jit
        def logits(params, tokens):
            columns = jnp.broadcast_to(jnp.arange(learning.T)[None], tokens.shape)
            return MODEL.unembed(params, MODEL.forward(params, tokens, columns, None, cfg)[0], cfg)

        def every(params, tokens):
            scaled = np.asarray(logits(params, tokens))[:, :-1] / TEMPERATURE
            return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))

        def alone(params, tokens):
            return np.take_along_axis(every(params, tokens), tokens[:, 1:, None], axis=-1)[..., 0]

        with jax.set_mesh(mesh):
            half = jax.tree.map(lambda x: 0.5 * x, weights.params)
            expected = {"old_logprobs": weights.params, "ref_logprobs": half}
            for name, params in expected.items():
                rows = np.where(rollout.action_mask[:, 1:], alone(params, rollout.tokens), 0)
                # The credit's metrics are float32.
                np.testing.assert_allclose(found[name][:, 1:], rows, rtol=1e-6)
                assert (found[name][:, 0] == 0).all()
            said = every(weights.params, rollout.tokens)
            entropy = np.where(rollout.action_mask[:, 1:], -(np.exp(said) * said).sum(-1), 0)
            np.testing.assert_allclose(found["old_entropy"][:, 1:], entropy, rtol=1e-6)
            squared = np.where(rollout.action_mask[:, 1:], np.exp(2 * said).sum(-1), 0)
            np.testing.assert_allclose(found["old_sum_squared"][:, 1:], squared, rtol=1e-6)
        np.testing.assert_array_equal(found["behaviour_logprobs"], rollout.sampler_logprobs.astype(np.float32))


def test_the_sampling_distribution_is_the_truncated_one_where_there_is_one():
    rollout, scores = learning.sequences()
    cut = rollout.replace(truncated_logprobs=rollout.sampler_logprobs + 0.5, support_size=None)
    judged = dict(objective=probe(credit_logprobs=True), num_groups=learning.B, max_completion=learning.C)
    zeros = jnp.zeros((1, 1, learning.T))
    before = [(Recomputed(old_logprobs=zeros), jnp.full(zeros.shape, -1, jnp.int32))]
    found = jax.jit(lambda *x: credit(*x, (), CONFIG, before, **judged).metrics)(cut, scores)
    np.testing.assert_array_equal(found["advantage/behaviour_logprobs"], cut.truncated_logprobs)
    assert "advantage/ref_logprobs" not in found and "advantage/values" not in found


def test_without_the_need_there_are_no_log_probs_and_components_keep_their_holes():
    found = given(MeshShape(), Learner(row_length=learning.T), objective=probe())
    assert not set(FIELDS[:-1]) & found.keys()
    rollout, scores = learning.sequences()
    np.testing.assert_array_equal(found["component/Exact"], scores.reward)
    assert np.isnan(found["component/Length"]).all()
    # 12 columns: row i, column t is 12 i + t; summed over actions, mean over valid rows.
    sums = (np.arange(rollout.tokens.size).reshape(rollout.tokens.shape) * rollout.action_mask).sum(-1)
    np.testing.assert_allclose(found["reward/tokens"], sums[scores.valid].mean(), rtol=1e-6)


def test_rows_are_judged_for_a_refill_without_log_probs():
    def keep(config, groups):
        assert groups.values is None and groups.old_logprobs is None and groups.ref_logprobs is None
        assert groups.behaviour_logprobs is None and set(groups.components) == {"Exact"}
        return groups.components["Exact"] > 0

    rollout, scores = learning.sequences()
    scores = scores.replace(components={"Exact": scores.reward})
    judged = dict(objective=EVERYTHING._replace(keep=keep), num_groups=learning.B, max_completion=learning.C)
    kept = jax.jit(lambda *x: kept_rows(*x, CONFIG, **judged))(rollout, scores)
    np.testing.assert_array_equal(kept, (scores.reward > 0) & scores.valid)


def test_selected_tokens_are_packed_with_their_sequences():
    """Every third token of the batch is selected, and is found again at its place in the packed rows."""
    rollout, scores = learning.sequences()
    mark = np.arange(rollout.tokens.size).reshape(rollout.tokens.shape) % 3 == 0
    row = probe()._replace(
        select=lambda config, groups, advantages: groups.action_mask & mark & (groups.sample >= 0)[:, None]
    )
    plan = learning.planned(rollout, Learner(row_length=32), 1, 0)
    judged = dict(objective=row, num_groups=learning.B, max_completion=learning.C)

    @jax.jit
    def run(rollout, scores, plan):
        found = credit(rollout, scores, (), CONFIG, **judged)
        packed = pack_rollout(rollout, plan, jnp.float32(TEMPERATURE))
        static = dict(objective=row, max_completion=learning.C)
        return finish_sampled(packed, Recomputed(), plan, found, CONFIG, **static)

    batch = run(rollout, scores, jax.tree.map(jnp.asarray, plan))
    width, count = rollout.tokens.shape[1], rollout.tokens.shape[0]
    np.testing.assert_array_equal(unpack(batch.selected, plan.source, width, count), rollout.action_mask & mark)
    assert batch.selected.sum() > 3


def test_tokens_are_packed_with_their_age_and_rows_are_told_apart_by_task():
    """Tokens of versions 3, 4 and 5, learned from by version 7, are 4, 3 and 2 versions old in the packed rows too.
    Prompts are of the tasks 9, 5, 7 and 9 in turn."""
    rollout, scores = learning.sequences()
    drawn = 3 + np.arange(rollout.tokens.size, dtype=np.int32).reshape(rollout.tokens.shape) % 3
    rollout = rollout.replace(version=np.where(rollout.action_mask, drawn, -1))
    hashes = np.resize(np.array([9, 5, 7, 9], np.uint32), learning.B)
    scores = scores.replace(task=hashes[rollout.group])
    found_tasks = lambda config, groups, reward, state: (jnp.zeros(drawn.shape), state, {"task": groups.task})
    row = probe(staleness=True, task=True)._replace(advantages=found_tasks)
    plan = learning.planned(rollout, Learner(row_length=32), 1, 0)
    judged = dict(objective=row, num_groups=learning.B, max_completion=learning.C)

    @jax.jit
    def run(rollout, scores, plan):
        found = credit(rollout, scores, (), CONFIG, version=jnp.int32(7), **judged)
        packed = pack_rollout(rollout, plan, jnp.float32(TEMPERATURE))
        static = dict(objective=row, max_completion=learning.C)
        return found.metrics["advantage/task"], finish_sampled(packed, Recomputed(), plan, found, CONFIG, **static)

    task, batch = run(rollout, scores, jax.tree.map(jnp.asarray, plan))
    width, count = rollout.tokens.shape[1], rollout.tokens.shape[0]
    age = np.where(rollout.action_mask, 7 - drawn, 0)
    np.testing.assert_array_equal(unpack(batch.staleness, plan.source, width, count), age)
    assert set(np.unique(age)) == {0, 2, 3, 4}
    first = [int(np.argmax(hashes == hashes[group])) for group in rollout.group]
    np.testing.assert_array_equal(task, first)


@pytest.mark.parametrize("row_length, minibatch, minibatches", [(32, 0, 1), (64, 0, 1), (32, 0, 2), (32, 1, 2)])
def test_rows_with_a_mean_of_their_own_weigh_alike_however_they_are_packed(row_length, minibatch, minibatches):
    """Each of their tokens has (tokens of the optimizer step) / (tokens of its positive rows), and the others 0."""
    rollout, scores = learning.sequences()
    good = np.arange(learning.N) % 3 == 1
    row = probe()._replace(positive=lambda config, groups: groups.valid & good)
    plan = learning.planned(rollout, Learner(row_length=row_length, minibatches=minibatches), 1, minibatch)
    static = dict(objective=row, max_completion=learning.C)

    @jax.jit
    def run(rollout, scores, plan):
        found = credit(rollout, scores, (), CONFIG, num_groups=learning.B, **static)
        packed = pack_rollout(rollout, plan, jnp.float32(TEMPERATURE))
        return found.loss_mask, finish_sampled(packed, Recomputed(), plan, found, CONFIG, **static)

    loss_mask, batch = run(rollout, scores, jax.tree.map(jnp.asarray, plan))
    counts = np.asarray(loss_mask) & plan.member[:, None]
    positive = counts & good[:, None]
    assert 0 < positive.sum() < counts.sum()
    got = unpack(batch.positive_weights, plan.source, rollout.tokens.shape[1], learning.N)
    np.testing.assert_allclose(got, np.where(positive, counts.sum() / positive.sum(), 0), rtol=1e-6)


def test_rewards_are_shaped_before_the_objective_sees_them_and_logged_as_they_were_scored():
    rollout, scores = learning.sequences()
    valid = np.asarray(scores.valid)
    scores = scores.replace(components={"safe": np.where(np.arange(len(valid)) % 2, 1, 0).astype(np.float32)})
    shaping = Shaping(constraints=Constraints(components=("safe",), infeasible_reward=-2.0))
    kept = lambda config, groups: groups.reward > -2
    row = probe()._replace(
        shape=lambda config, groups: groups.reward + 1,
        advantages=lambda config, groups, reward, state: (
            jnp.zeros(groups.action_mask.shape), state, {"seen": groups.reward, "shaped": reward}),
        keep=kept,
    )  # fmt: skip
    judged = dict(objective=row, num_groups=learning.B, max_completion=learning.C)
    found = jax.jit(lambda *x: credit(*x, (), CONFIG, (), shaping, **judged))(rollout, scores)
    expected = np.where(np.arange(len(valid)) % 2, scores.reward, -2)
    np.testing.assert_allclose(np.asarray(found.metrics["advantage/seen"])[valid], expected[valid], rtol=1e-6)
    np.testing.assert_allclose(found.metrics["advantage/shaped"] - found.metrics["advantage/seen"], 1, rtol=1e-6)
    np.testing.assert_allclose(found.metrics["reward/mean"], np.asarray(scores.reward)[valid].mean(), rtol=1e-5)
    np.testing.assert_allclose(found.metrics["reward/shaped"], expected[valid].mean() + 1, rtol=1e-5)
    assert found.metrics["reward/min"] == np.asarray(scores.reward)[valid].min()
    assert found.metrics["reward/max"] == np.asarray(scores.reward)[valid].max()
    rows = jax.jit(lambda *x: kept_rows(*x, CONFIG, shaping, **judged))(rollout, scores)
    np.testing.assert_array_equal(rows, valid & (np.arange(len(valid)) % 2 == 1))


def test_how_long_and_how_old_completions_are_and_how_many_were_cut():
    """Of three completions, of 1, 2 and 3 tokens, the last two were cut; the fourth row has none."""
    rollout, scores = learning.sequences()
    columns = np.arange(rollout.tokens.shape[1])
    mask = (columns >= 2) & (columns < 2 + np.arange(1, len(rollout.tokens) + 1)[:, None])
    mask[3:] = False
    finish = np.array([Finish.STOP_TOKEN, Finish.LENGTH, Finish.LENGTH], np.int8)
    finish = np.concatenate([finish, np.full(len(mask) - 3, Finish.LENGTH, np.int8)])
    version = np.where(columns == 2, 5, 7).astype(np.int32) * np.ones_like(rollout.version)
    rollout = rollout.replace(action_mask=mask, finish=finish, version=version)
    static = dict(objective=probe(), num_groups=learning.B, max_completion=learning.C)
    given = lambda valid: (rollout, scores.replace(valid=valid), (), CONFIG, (), None, jnp.int32(8))
    judge = lambda valid: credit(*given(valid), **static).metrics
    found, unjudged = judge(np.arange(len(mask)) < 3), judge(np.zeros(len(mask), bool))
    assert found["rollout/completion_length"] == 2 and found["rollout/completion_length_max"] == 3
    np.testing.assert_allclose(found["rollout/truncated_share"], 2 / 3, rtol=1e-6)
    # Versions 5, 5, 7, 5, 7, 7 at version 8: 3 + 3 + 1 + 3 + 1 + 1 = 12, over six tokens.
    assert found["rollout/staleness"] == 2 and found["rollout/staleness_max"] == 3
    assert unjudged["reward/min"] == unjudged["reward/max"] == 0


def test_a_reward_that_is_exploited_shows_by_hand():
    """Four rows of a prompt, 1, 2, 3 and 4 tokens long of at most 4; the longer the better scored, and the worse."""
    action = jnp.arange(4)[None, :] < jnp.arange(1, 6)[:, None]
    scored, outcome = jnp.array([0.0, 1.0, 2.0, 3.0, NAN]), jnp.array([1.0, 1.0, 0.0, 0.0, NAN])
    groups = Groups(
        reward=scored, outcome=outcome, valid=jnp.arange(5) < 4, group=jnp.zeros(5, jnp.int32), action_mask=action,
        finish=jnp.zeros(5, jnp.int8), num_groups=1, max_completion=4,
    )  # fmt: skip
    shaped_reward = scored.at[3].set(1.5)  # now below the third
    found = jax.jit(hacking_metrics)(groups, scored, shaped_reward)
    assert float(found["reward/outcome"]) == 0.5
    # Deviations: of 0, 1, 2, 1.5 -1.125, -0.125, 0.875, 0.375, of 1, 1, 0, 0 0.5 and -0.5, of the lengths -1.5 to 1.5
    a, b, c = np.array([-1.125, -0.125, 0.875, 0.375]), np.array([0.5, 0.5, -0.5, -0.5]), np.arange(4) - 1.5
    corr = lambda x, y: (x @ y) / np.sqrt((x @ x) * (y @ y))
    np.testing.assert_allclose(found["reward/outcome_correlation"], corr(a, b), rtol=1e-5)
    np.testing.assert_allclose(found["reward/length_correlation"], corr(a, c), rtol=1e-5)
    assert float(found["reward/order_flipped"]) == 0.5  # the third and the fourth
    assert [float(found[f"reward/length_quarter_{i}"]) for i in (1, 2, 3, 4)] == [0, 1, 2, 3]
    assert [float(found[f"rollout/length_quarter_{i}"]) for i in (1, 2, 3, 4)] == [0.25] * 4
