"""SCoRe, both stages: what the attempts of a row earn, and what ties them to the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
from jrl.algos import ALGOS
from jrl.algos.contract import Facts, Groups, Tokens
from jrl.algos.score import SCoRe
from jrl.algos.score_first import SCoReFirst
from jrl.config.errors import ConfigError

FACTS = Facts(
    samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=4, attempts=2
)


def attempts():
    """One prompt of four rows: right twice, right after wrong, wrong after right, and wrong and cut; and one more row
    without a verdict. Columns: two tokens of the first attempt, the instruction, one of the second."""
    second = jnp.array([1.0, 1.0, 0.0, 0.0, jnp.nan])
    missing = jnp.array([[False]] * 3 + [[True], [False]])
    column = jnp.arange(4)[None, :]
    return Groups(
        reward=second,
        outcome=second,
        valid=jnp.arange(5) < 4,
        group=jnp.zeros(5, jnp.int32),
        action_mask=(column < 2) | ((column == 3) & ~missing),
        finish=jnp.zeros(5, jnp.int8),
        num_groups=1,
        max_completion=4,
        components={"first_attempt": jnp.array([1.0, 0.0, 1.0, 0.0, jnp.nan])},
        turn=jnp.tile(jnp.array([[0, 0, 9, 1]], jnp.int8), (5, 1)),
    )


def credited(objective, config):
    run = jax.jit(lambda config, groups: objective.advantages(config, groups, groups.reward, ()))
    found, state, counters = run(config, attempts())
    assert state == ()
    return np.asarray(found), counters


def test_the_bonus_is_on_the_second_attempt_by_hand():
    found, counters = credited(ALGOS["SCoRe"], SCoRe())
    # First attempts: 1, 0, 1, 0, less their mean 1/2. Second ones: 1, 1 + 10 * (1 - 0) = 11, 0 + 10 * (0 - 1) = -10,
    # less their mean 2/3; the fourth row has none.
    first, second = np.array([0.5, -0.5, 0.5, -0.5, 0]), np.array([1 / 3, 31 / 3, -32 / 3, 0, 0])
    expected = np.stack([first, first, np.zeros(5), second], axis=1)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert counters["progress"] == pytest.approx((0 + 1 - 1 + 0) / 4)  # of the rows with a verdict


def test_without_a_bonus_each_attempt_is_compared_alone():
    found, _ = credited(ALGOS["SCoRe"], SCoRe(bonus=0.0))
    np.testing.assert_allclose(found[:, 3], [1 / 3, 1 / 3, -2 / 3, 0, 0], atol=1e-6)


def test_the_first_stage_rewards_the_second_attempt_alone():
    objective = ALGOS["SCoReFirst"]
    found, _ = credited(objective, SCoReFirst())
    np.testing.assert_allclose(found[:, :3], 0)
    np.testing.assert_allclose(found[:, 3], [1 / 3, 1 / 3, -2 / 3, 0, 0], atol=1e-6)
    selected = objective.select(SCoReFirst(), attempts(), found)
    np.testing.assert_array_equal(selected, [[True, True, False, False]] * 5)


def pulled(name, config, selected):
    """Returns the loss of three tokens without an advantage, and its gradient by log-prob; the last one is masked."""
    new, ref = jnp.array([-1.0, -1.0, jnp.nan]), jnp.array([-1.5, -3.0, jnp.nan])
    batch = Tokens(
        logprobs=new, old_logprobs=new, behaviour_logprobs=new, ref_logprobs=ref, entropy=jnp.ones(3),
        advantages=jnp.zeros(3), mask=jnp.array([True, True, False]), segment=jnp.zeros(3, jnp.int32), num_segments=1,
        selected=None if selected is None else jnp.array(selected),
    )  # fmt: skip
    loss = lambda logprobs: ALGOS[name].token_loss(config, batch.replace(logprobs=logprobs), ())[0]
    return jax.jit(loss)(new), jax.grad(lambda logprobs: loss(logprobs).sum())(new)


def test_the_pull_to_the_reference_by_hand():
    # k2 = d^2 / 2 with d = 0.5 and 2: 0.125 and 2; its gradient is d.
    loss, gradient = pulled("SCoRe", SCoRe(kl=0.01), None)
    np.testing.assert_allclose(loss, [0.01 * 0.125, 0.01 * 2, 0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0.01 * 0.5, 0.01 * 2, 0], rtol=1e-6)
    # On the first attempt 0.01 + 0.1, on the second 0.01.
    loss, gradient = pulled("SCoReFirst", SCoReFirst(), [True, False, True])
    np.testing.assert_allclose(loss, [0.11 * 0.125, 0.01 * 2, 0], rtol=1e-5)
    np.testing.assert_allclose(gradient, [0.11 * 0.5, 0.01 * 2, 0], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "facts", "reason"),
    [
        ("SCoRe", {}, {"attempts": 1}, "SCoRe learns from two attempts"),
        ("SCoReFirst", {}, {"attempts": 1}, "SCoReFirst learns from two attempts"),
        ("SCoRe", {"bonus": -1.0}, {}, "must not be negative"),
        ("SCoRe", {"kl": 0.0}, {}, "SCoRe.kl = 0.0 must be above 0"),
        ("SCoReFirst", {"first_kl": 0.0}, {}, "first_kl = 0.0 must be above 0"),
    ],
)
def test_what_cannot_work_is_refused(name, options, facts, reason):
    with pytest.raises(ValueError, match=reason):
        ALGOS[name].check(ALGOS[name].config(**options), FACTS._replace(**facts))


JUDGE = ["Config.judges=[@Judge()]", "Judge.address='http://localhost:8000/v1'", "Judge.model='m'",
         "Judge.grading=@Grade()"]  # fmt: skip
MODEL = ["Config.reward=@RewardModel()", "RewardModel.path='judge'"]


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        (["Online.rewards={'reward': 0.5}"], "Set Online.rewards = {}"),
        (["Online.rewards={}", *JUDGE], r"Set Online.judges = \(\)"),
        (["Online.rewards={}", *MODEL], "Set Config.reward = None"),
    ],
)
def test_a_reward_of_the_second_attempt_alone_is_refused(more, advice):
    """Two equal wrong answers, of which a model gives the second 0.5, would be a progress of 0.5."""
    config, score = "configs/rlhf-tiny.gin", "Online.objective=@SCoRe()"
    attempts = ["Online.strategy=@SelfCorrection()", "Sampler.completion_length=40"]
    with pytest.raises(ConfigError, match=f"SCoRe compares the rewards of two attempts, .* {advice}"):
        jrl.load_config(config, [score, *attempts, *more])
    jrl.load_config(config, [score, *attempts, "Online.rewards={}"])
    jrl.load_config(config, [score, *attempts, "Online.rewards={}", *JUDGE, "Judge.weight=0.0"])
    jrl.load_config(config, [score, *attempts, "Online.rewards={}", *MODEL, "RewardModel.weights=(0.0, 0.0)"])
    jrl.load_config(config, ["Online.objective=@SCoReFirst()", *attempts, *more])
