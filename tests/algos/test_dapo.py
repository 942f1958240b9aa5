from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.contract import Facts, Groups, Tokens
from jrl.algos.dapo import DAPO
from jrl.config.errors import ConfigError
from jrl.resolve import load_config
from jrl.types import Finish

OBJECTIVE = ALGOS["DAPO"]
DAPO_BY_MODEL = ["Online.objective=@DAPO()", "Online.critic=None"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=8)


def groups(outcome, length, finish=None, valid=None, per_group=2):
    outcome, rows = jnp.array(outcome, jnp.float32), len(outcome)
    return Groups(
        reward=outcome,
        outcome=outcome,
        valid=jnp.ones(rows, bool) if valid is None else jnp.array(valid),
        group=jnp.arange(rows, dtype=jnp.int32) // per_group,
        action_mask=jnp.arange(10)[None, :] < jnp.array(length)[:, None],
        finish=jnp.zeros(rows, jnp.int8) if finish is None else jnp.array(finish, jnp.int8),
        num_groups=rows // per_group,
        max_completion=8,
    )


def test_the_reward_falls_over_the_last_tokens_before_the_limit():
    # limit 8, buffer 4: length 4 -> 0; 6 -> -0.5; 8 -> -1
    batch = groups([1, 1, 0, 1], [4, 6, 8, 1])
    shape = jax.jit(OBJECTIVE.shape)
    np.testing.assert_allclose(shape(DAPO(overlong_buffer=4), batch), [1, 0.5, -1, 1], rtol=1e-6)
    half = shape(DAPO(overlong_buffer=4, overlong_penalty=0.5), batch)
    np.testing.assert_allclose(half, [1, 0.75, -0.5, 1], rtol=1e-6)
    np.testing.assert_array_equal(shape(DAPO(), batch), batch.reward)


def test_groups_without_signal_are_dropped_by_outcome_and_not_by_shaped_reward():
    batch = groups([1, 1, 0, 1, 0, 0], [4, 8, 4, 4, 4, 4])
    keep = jax.jit(OBJECTIVE.keep)
    np.testing.assert_array_equal(keep(DAPO(overlong_buffer=4), batch), [0, 0, 1, 1, 0, 0])
    np.testing.assert_array_equal(keep(DAPO(max_refills=0), batch), [0, 0, 1, 1, 0, 0])
    np.testing.assert_array_equal(keep(DAPO(max_refills=None), batch), [1] * 6)


def test_the_outcome_is_judged_and_not_the_reward():
    batch = groups([1, 1, 0, 1], [4] * 4).replace(reward=jnp.array([1.0, 0.9, 0.5, 0.5]))
    np.testing.assert_array_equal(OBJECTIVE.keep(DAPO(), batch), [0, 0, 1, 1])


def test_a_group_with_one_row_left_is_dropped():
    batch = groups([1, 0, 1, 0], [4] * 4, valid=[True, False, True, True])
    np.testing.assert_array_equal(OBJECTIVE.keep(DAPO(), batch), [0, 0, 1, 1])


def test_overlong_rows_leave_the_loss_and_stay_in_the_statistics():
    # one group of four: [1, 0, 0, 1], row 2 cut at the limit
    batch = groups([1, 0, 0, 1], [4, 4, 8, 4], finish=[0, 0, Finish.LENGTH, 0], per_group=4)
    np.testing.assert_array_equal(OBJECTIVE.keep(DAPO(overlong_filter=True), batch), [1, 1, 0, 1])
    np.testing.assert_array_equal(OBJECTIVE.keep(DAPO(), batch), [1, 1, 1, 1])
    advantages, _, _ = OBJECTIVE.advantages(DAPO(overlong_filter=True), batch, batch.reward, ())
    z = 0.866024  # 0.5 / (sqrt(1/3) + 1e-6)
    np.testing.assert_allclose(advantages[:, 0], [z, -z, -z, z], rtol=1e-6)


def test_advantages_are_of_the_shaped_reward():
    # outcomes equal, shaped [1, 0]: 0.5 / (sqrt(0.5) + 1e-6) = 0.707106
    config, batch = DAPO(overlong_buffer=4, max_refills=None), groups([1, 1], [4, 8])
    advantages, _, counters = OBJECTIVE.advantages(config, batch, OBJECTIVE.shape(config, batch), ())
    np.testing.assert_allclose(advantages[:, 0], [0.7071058, -0.7071058], rtol=1e-6)
    assert counters["zero_variance_groups"] == 0


def test_the_upper_clip_is_wider():
    # A = 1: rho 1.25 below 1.28 keeps its gradient, rho 1.3 is clipped to 1.28; A = -1, rho 0.75: 0.8
    tokens = Tokens(
        logprobs=jnp.log(jnp.array([1.25, 1.3, 0.75])),
        old_logprobs=jnp.zeros(3),
        behaviour_logprobs=jnp.zeros(3),
        ref_logprobs=None,
        entropy=jnp.ones(3),
        advantages=jnp.array([1.0, 1.0, -1.0]),
        mask=jnp.ones(3, bool),
        segment=jnp.zeros(3, jnp.int32),
        num_segments=1,
    )
    loss, metrics = jax.jit(OBJECTIVE.token_loss)(DAPO(), tokens, ())
    np.testing.assert_allclose(loss, [-1.25, -1.28, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(metrics["clip_fraction_high"], [0, 1, 0])
    np.testing.assert_array_equal(metrics["clip_fraction_low"], [0, 0, 1])
    with_bonus, _ = OBJECTIVE.token_loss(DAPO(entropy_bonus=0.1), tokens, ())
    np.testing.assert_allclose(with_bonus - loss, -0.1, rtol=1e-5)


def test_tokens_weigh_alike():
    mask = jnp.array([[True, False, False], [True, True, True]])
    np.testing.assert_array_equal(OBJECTIVE.weights(DAPO(), mask, 3), mask)
    assert OBJECTIVE.denominator(DAPO(), mask, 8, 3) == 4


def test_the_rounds_of_refill_are_the_configured_ones():
    assert OBJECTIVE.refill(DAPO()) == 10
    assert OBJECTIVE.refill(DAPO(max_refills=2)) == 2
    assert OBJECTIVE.refill(DAPO(max_refills=None)) is None
    assert not OBJECTIVE.needs(DAPO()).reference


@pytest.mark.parametrize("buffer", [1, 8])
def test_a_buffer_within_the_completion_is_accepted(buffer):
    OBJECTIVE.check(DAPO(overlong_buffer=buffer), FACTS)


@pytest.mark.parametrize(
    "config, facts, message",
    [
        (DAPO(overlong_buffer=9), FACTS, r"DAPO\.overlong_buffer = 9 must be 1 to 8 tokens"),
        (DAPO(overlong_buffer=0), FACTS, r"DAPO\.overlong_buffer = 0"),
        (DAPO(overlong_penalty=0.0), FACTS, r"DAPO\.overlong_penalty = 0\.0"),
        (DAPO(max_refills=-1), FACTS, r"DAPO\.max_refills = -1"),
        (DAPO(clip_low=1.0), FACTS, r"DAPO\.clip_low = 1\.0"),
        (DAPO(dual_clip=1.28), FACTS, r"DAPO\.dual_clip = 1\.28"),
        (DAPO(), FACTS._replace(samples=1), "at least 2 of them"),
        (
            DAPO(),
            FACTS._replace(held_out_outcome=True),
            r"DAPO keeps the groups .* \(max_refills = 10\), and the f",
        ),
    ],
)
def test_illegal_combinations_are_refused(config, facts, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, facts)


def test_groups_are_not_filtered_by_a_verdict_that_is_held_out():
    # With a reward model and a verifier of weight 0, the filter read the verifier.
    with pytest.raises(ConfigError, match=r"from a held-out verdict\. Set DAPO\.max_refills = None"):
        load_config("configs/algos/tldr_ppo.gin", DAPO_BY_MODEL)
    load_config("configs/algos/tldr_ppo.gin", [*DAPO_BY_MODEL, "DAPO.max_refills=None"])
