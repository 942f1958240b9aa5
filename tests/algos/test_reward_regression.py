"""Reward models of attributes (P3) and of steps (P4), by hand."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from narrow_inputs import check_widens
from test_pair_objectives import FACTS, sequences

import jrl
from jrl.algos import ALGOS
from jrl.algos.attribute_regression import AttributeRegression
from jrl.algos.process_reward import ProcessReward
from jrl.algos.vpl import VPL
from jrl.config import ConfigError
from jrl.experiment import attribute_weights_of
from jrl.models.heads import REWARD, fresh_heads
from jrl.ops.reward_regression import attribute_error, rollout_label, step_cross_entropy, through_first_wrong
from jrl.run.trained import role_heads

NAN = jnp.nan


def rated(score, value, mask=None):
    """A row of single sequences with scores and ratings of two attributes each."""
    count = len(score)
    row = sequences([0.0] * count, [0.0] * count, [3] * count, [1.0] * count, mask)
    alone = jnp.arange(count, dtype=jnp.int32)[None]
    return dataclasses.replace(row, logprob=None, ref_logprob=None, unit=alone,
                               score=jnp.float32([score]), value=jnp.float32([value]))  # fmt: skip


def test_attribute_error_by_hand():
    # ((3 - 4)^2 + 0) / 2; with the second one not rated (3 - 4)^2 / 1; with none rated 0
    run = jax.jit(attribute_error)
    np.testing.assert_allclose(run(jnp.array([3.0, 1.0]), jnp.array([4.0, 1.0]), jnp.array([True, True])), 0.5)
    np.testing.assert_allclose(run(jnp.array([3.0, 1.0]), jnp.array([4.0, NAN]), jnp.array([True, False])), 1.0)
    np.testing.assert_allclose(run(jnp.array([3.0, 1.0]), jnp.array([NAN, NAN]), jnp.array([False, False])), 0.0)


def test_step_cross_entropy_by_hand():
    logit = lambda p: np.log(p / (1 - p))
    loss = jax.jit(step_cross_entropy)(jnp.float32([logit(0.9), logit(0.4), logit(0.4)]), jnp.float32([1, 0, 0.25]))
    # -log 0.9, -log 0.6, and of a soft label -(0.25 log 0.4 + 0.75 log 0.6); the mean of the first two is 0.30809
    np.testing.assert_allclose(loss, [0.105361, 0.510826, 0.612192], 1e-5)
    np.testing.assert_allclose(loss[:2].mean(), 0.30809, atol=1e-5)
    slope = jax.grad(lambda s: step_cross_entropy(s, jnp.float32([1, 0.25])).sum())(jnp.float32([0.0, 0.0]))
    np.testing.assert_allclose(slope, [-0.5, 0.25], 1e-6)  # sigmoid(s) - y
    check_widens(step_cross_entropy, jnp.array([0.3, -2.1]), jnp.array([0.7, 0.1]))


def test_labels_of_completions():
    # Two of four; the only one that is right was not scored; none was; the only one that was is right.
    correct = jnp.array(
        [[True, False, False, True], [False, False, False, True], [True] * 4, [True, True, False, True]]
    )
    scored = jnp.array([[True] * 4, [True, True, True, False], [False] * 4, [False, True, False, False]])
    for rows in (jnp.asarray, lambda x: jnp.asarray(x)[None]):  # of every step, whatever axes they have
        np.testing.assert_array_equal(rollout_label(rows(correct), rows(scored), soft=False), rows([1, 0, NAN, 1]))
        np.testing.assert_array_equal(rollout_label(rows(correct), rows(scored), soft=True), rows([0.5, 0, NAN, 1]))


def test_steps_after_the_first_wrong_one_are_left_out():
    label = jnp.array([[1, 0, 1, 0], [1, 1, 1, NAN], [0, 1, 1, 1]])
    steps = ~jnp.isnan(label)
    expected = [[True, True, False, False], [True, True, True, False], [True, False, False, False]]
    np.testing.assert_array_equal(through_first_wrong(label, steps), expected)
    np.testing.assert_array_equal(through_first_wrong(label[0], steps[0]), expected[0])


def test_attributes_that_are_not_rated_have_no_gradient():
    batch = rated([[3.0, 1.0], [2.0, 5.0], [NAN, NAN]], [[4.0, 1.0], [0.0, NAN], [1.0, 1.0]], [True, True, False])
    row, config = ALGOS["AttributeRegression"], AttributeRegression(attributes=2)
    total = lambda score: row.sequence_loss(config, batch.replace(score=score), ())[0]
    np.testing.assert_allclose(jax.jit(total)(batch.score), [[0.5, 4.0, 0]])
    slope = jax.grad(lambda score: total(score).sum())(batch.score)
    np.testing.assert_allclose(slope, [[[-1, 0], [4, 0], [0, 0]]])  # 2 (o - y) / rated
    empty = batch.replace(length=jnp.int32([[0, 3, 3]]))
    np.testing.assert_allclose(row.sequence_loss(config, empty, ())[0], [[0, 4.0, 0]])


def test_a_step_is_judged_at_its_end_alone():
    logit = np.log(0.9 / 0.1)
    batch = dataclasses.replace(
        rated([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [True, True, False]),
        score=jnp.float32([[logit, 0.0, NAN]]), label=jnp.float32([[1, 0, 1]]),
    )  # fmt: skip
    row = ALGOS["ProcessReward"]
    loss, metrics = jax.jit(row.sequence_loss)(ProcessReward(), batch, ())
    np.testing.assert_allclose(loss, [[0.105361, 0.693147, 0]], 1e-5)
    np.testing.assert_allclose(metrics["reward_model/accuracy"], [[1, 0.5, 0]])
    np.testing.assert_allclose(metrics["reward_model/probability"], [[0.9, 0.5, 0]], 1e-6)
    slope = jax.grad(lambda s: row.sequence_loss(ProcessReward(), batch.replace(score=s), ())[0].sum())(batch.score)
    np.testing.assert_allclose(slope, [[-0.1, 0.5, 0]], 1e-5)


def test_a_head_has_an_output_for_each_attribute():
    row = ALGOS["AttributeRegression"]
    row.check(AttributeRegression(), FACTS)
    needs = row.needs(AttributeRegression(attributes=3))
    head = fresh_heads(needs.heads, jax.random.key(0), 8, "float32", outputs=needs.head_outputs)
    assert head[REWARD].shape == (1, 8, 3)
    with pytest.raises(ValueError, match=r"AttributeRegression\.attributes = 0"):
        row.check(AttributeRegression(attributes=0), FACTS)


@pytest.mark.parametrize(
    "binding, message",
    [
        ("AttributeRegression.attributes = 2", r"a reward head with 2 outputs, and Rated\.values names 3 attributes"),
        ("Online.attribute_weights = (1.0, 1.0)", r"has 2 weights, and the reward head of 'reward' has 3 outputs"),
        ("Online.attribute_weights = (1.0, 1.0, 1e300)", r"expects a float of at most 3\.4e\+38"),
        ("Online.rewards = {}", r"for the reward models in Online\.rewards, which names none"),
    ],
)
def test_weights_and_names_go_with_the_outputs(binding, message):
    with pytest.raises(ConfigError, match=message):
        jrl.load_config("configs/algos/attribute_regression.gin", [binding])


def test_a_reward_model_and_its_moving_average_are_opened_as_the_run_read_them(mesh):
    config, parts = jrl.load_config("configs/algos/attribute_regression.gin")
    warm, judge, online = config.stages
    averaged = dataclasses.replace(judge, optimizer=dataclasses.replace(judge.optimizer, average=0.9))
    never = dataclasses.replace(online, steps=0, trains="other")
    stages = (warm, averaged, never, online)
    for role, reached in (("reward", 3), ("average", 1)):
        assert attribute_weights_of(stages, role, parts.tables, reached) == (0.65, 0.8, -0.1)
        policy = types.SimpleNamespace(
            config=dataclasses.replace(config, stages=stages), parts=parts, mesh=mesh,
            cfg=types.SimpleNamespace(width=8, param_dtype="float32"),
        )  # fmt: skip
        assert role_heads(policy, role, reached)[REWARD].shape == (1, 8, 3)
    with pytest.raises(ValueError, match="the run has no role 'other'"):
        role_heads(policy, "other", len(stages) - 1)
    with pytest.raises(ValueError, match="the role 'average' is trained from stage 'judge' on, and this checkpoint"):
        role_heads(policy, "average", 0)
    assert (
        attribute_weights_of((warm, averaged, online), "critic", parts.tables, 2)
        is attribute_weights_of((warm, judge), "reward", parts.tables, 1)
        is None
    )


def test_a_reward_model_that_is_trained_anew_has_the_weights_of_the_checkpoint_s_own_head():
    config, parts = jrl.load_config("configs/algos/attribute_regression.gin")
    warm, judge, online = config.stages
    users = dataclasses.replace(judge, objective=VPL())
    unread = dataclasses.replace(online, rewards={}, attribute_weights=None)
    weights = lambda *stages: [attribute_weights_of(stages, "reward", parts.tables, i) for i in range(len(stages))]
    first = (1.0, *12 * (0.0,))  # of VPL: b of 1 + 3 * 4 outputs
    assert weights(warm, users, unread) == [None, first, first]
    assert weights(warm, users, unread, judge, online) == [None, first, first, *2 * [(0.65, 0.8, -0.1)]]
    other = dataclasses.replace(online, attribute_weights=(1.0, 0.0, 0.0))
    assert weights(judge, online, judge, other) == [*2 * [(0.65, 0.8, -0.1)], *2 * [(1.0, 0.0, 0.0)]]
    assert weights(judge, online, judge, unread) == 4 * [(0.65, 0.8, -0.1)]
    # 3 weights do not fit the 13 outputs of the head that VPL begins.
    assert weights(judge, online, users, unread) == [*2 * [(0.65, 0.8, -0.1)], first, first]
