"""On-policy distillation, GKD and distillation on stored text, by hand; and what has no teacher is refused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import loss_of, rows_with_values, tokens

import jrl
from jrl.algos import ALGOS
from jrl.algos.contract import Facts
from jrl.algos.distillation import Distillation
from jrl.algos.gkd import GKD
from jrl.algos.on_policy_distillation import OnPolicyDistillation
from jrl.compatibility import check
from jrl.config.errors import ConfigError
from jrl.experiment import TABLES

FACTS = Facts(samples=1, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=8)


def test_a_token_is_credited_with_what_the_teacher_gives_it_more():
    groups = rows_with_values()
    groups = groups.replace(teacher_logprobs=groups.old_logprobs + jnp.array([[0.5, -1, 7, 0.25]] * 4), values=None)
    row = ALGOS["OnPolicyDistillation"]
    found, state, counters = jax.jit(lambda g: row.advantages(OnPolicyDistillation(), g, g.reward, ()))(groups)
    # The tool's token, the row without a verdict and the one without a token have none.
    np.testing.assert_allclose(found, [[0.5, -1, 0, 0.25], [0, -1, 7, 0], [0] * 4, [0] * 4])
    assert state == () and counters["teacher_gap"] == pytest.approx((0.5 - 1 + 0.25 - 1 + 7) / 5)


def test_its_loss_is_ppos_clip():
    # ratios 1.5, 0.5: of advantage 0.5 clipped at 1.2, of -1 at 0.8
    batch = tokens(np.log([1.5, 0.5]), [0.0, 0.0], [0.5, -1.0])
    loss, _, gradient = loss_of(ALGOS["OnPolicyDistillation"], OnPolicyDistillation(), batch)
    np.testing.assert_allclose(loss, [-0.6, 0.8], 1e-6)
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("name", ["GKD", "Distillation"])
def test_the_loss_is_the_divergence_where_it_counts(name):
    row = ALGOS[name]
    batch = tokens([-1.0, -2.0, jnp.nan], [-1.0, -2.0, jnp.nan], [3.0, -3.0, jnp.nan])
    batch = batch.replace(divergence=jnp.array([0.25, 1.5, jnp.nan]), mask=jnp.array([True, True, False]))
    run = lambda d: row.token_loss(row.config(), batch.replace(divergence=d), ())
    loss, metrics = jax.jit(run)(batch.divergence)
    np.testing.assert_allclose(loss, [0.25, 1.5, 0])
    np.testing.assert_allclose(metrics["distillation/divergence"], loss)
    np.testing.assert_array_equal(jax.grad(lambda d: run(d)[0].sum())(batch.divergence), [1, 1, 0])
    assert row.needs(row.config(divergence="jensen_shannon")).divergence == "jensen_shannon"


def test_gkd_with_an_entropy_bonus_and_no_credit():
    batch = tokens([-1.0], [-1.0], [2.0]).replace(divergence=jnp.array([0.25]))
    loss, _, _ = loss_of(ALGOS["GKD"], GKD(entropy_bonus=0.1), batch)
    np.testing.assert_allclose(loss, [0.15])  # the entropy is 1
    found, _, _ = ALGOS["GKD"].advantages(GKD(), rows_with_values(), rows_with_values().reward, ())
    np.testing.assert_array_equal(found, jnp.zeros((4, 4)))


@pytest.mark.parametrize("config", [GKD(divergence="k1"), Distillation(divergence="k1")])
def test_an_unknown_divergence_is_refused(config):
    name = type(config).__name__
    with pytest.raises(ValueError, match=rf"{name}\.divergence = 'k1' must be one of 'reverse', 'forward'"):
        ALGOS[name].check(config, FACTS)


def test_without_a_teacher_it_is_refused():
    config, _ = jrl.load_config("configs/algos/gkd.gin")
    check(config, TABLES)
    alone = dataclasses.replace(config, stages=(config.stages[0], config.stages[-1]))
    with pytest.raises(ValueError, match="GKD learns from the role 'teacher', which no earlier stage trains"):
        check(alone, TABLES)


@pytest.mark.parametrize("objective", ["GKD", "OnPolicyDistillation"])
def test_shaping_of_rewards_that_are_not_read_is_refused(objective):
    bindings = [f"Online.objective=@{objective}()", "Online.shaping=@Shaping()"]
    with pytest.raises(ConfigError, match=rf"{objective} learns from the teacher, and Online\.shaping changes only"):
        jrl.load_config("configs/algos/gkd.gin", [*bindings, "Shaping.missing_stop=@MissingStop()"])
    constraints = ["Shaping.constraints=@Constraints()", "Constraints.components=('Regex',)",
                   "Constraints.infeasible_reward=None", "Addition.verifiers=()",
                   "Scoring.verifiers=[@Exact(), @Regex()]", "Regex.pattern='[0-9]+'"]  # fmt: skip
    jrl.load_config("configs/algos/gkd.gin", [*bindings, *constraints])  # these only mask rows
