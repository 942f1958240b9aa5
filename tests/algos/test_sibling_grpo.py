"""SiblingGRPO: what each part of a tree of completions is compared with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
from jrl.algos import ALGOS
from jrl.algos.contract import Facts, Groups
from jrl.algos.sibling_grpo import SiblingGRPO
from jrl.config import ConfigError

NAN = jnp.nan
OBJECTIVE = ALGOS["SiblingGRPO"]
CONFIG = SiblingGRPO(first=2, continuations=2)
FACTS = Facts(
    samples=6, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=4, branches=(2, 2)
)


def branched():
    """Two prompts of two completions with two branches each, in any order; columns 0 to 3 are sampled.

    First prompt: completion 0 earns 1 and parts at column 2, its branches earn 0 and 0; completion 1 earns 0 and parts
    at column 1, its branches earn 1 and were not judged. Second prompt: completion 0 has a branch alone, the other was
    aborted; completion 1 was not branched.
    """
    rows = [  # group, sample, first sampled column, tokens end, reward
        (0, 0, 0, 4, 1.0), (0, 2, 2, 4, 0.0), (0, 3, 2, 3, 0.0),
        (0, 1, 0, 3, 0.0), (0, 4, 1, 3, 1.0), (0, 5, 1, 4, NAN),
        (1, 1, 0, 3, 1.0), (1, 0, 0, 4, 0.0), (1, 2, 3, 4, 1.0), (1, 3, 4, 4, 0.0), (1, 4, 4, 4, 0.0),
        (1, 5, 4, 4, 0.0),
    ]  # fmt: skip
    group, sample, start, end, reward = (np.array(column) for column in zip(*rows))
    column = np.arange(4)
    reward = jnp.asarray(reward, jnp.float32)
    return Groups(
        reward=reward,
        outcome=reward,
        valid=~jnp.isnan(reward),
        group=jnp.asarray(group, jnp.int32),
        action_mask=jnp.asarray((column >= start[:, None]) & (column < end[:, None])),
        finish=jnp.zeros(12, jnp.int8),
        num_groups=2,
        max_completion=4,
        sample=jnp.asarray(sample, jnp.int32),
    )


def credited(groups, config=CONFIG):
    run = jax.jit(lambda config, g: OBJECTIVE.advantages(config, g, OBJECTIVE.shape(config, g), ()))
    return run(config, groups)


def test_what_parts_is_compared_where_it_parts_by_hand():
    found, state, counters = credited(branched())
    # First prompt. After the branches: 1, 0, 0 less 1/3; 0 and 1 less 1/2. Before: 1/3 and 1/2 less their mean 5/12.
    # Second prompt. After: 0 and 1 less 1/2. Before: 1/2, and 1 of the completion without a branch, less 3/4.
    third = 1 / 3
    expected = [
        [-1 / 12, -1 / 12, 2 * third, 2 * third], [0, 0, -third, -third], [0, 0, -third, 0],
        [1 / 12, -0.5, -0.5, 0], [0, 0.5, 0.5, 0], [0, 0, 0, 0],
        [0.25, 0.25, 0.25, 0], [-0.25, -0.25, -0.25, -0.5], [0, 0, 0, 0.5], [0] * 4, [0] * 4, [0] * 4,
    ]  # fmt: skip
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert state == () and int(counters["branched"]) == 4
    assert int(counters["unscorable"]) == 1 and int(counters["aborted"]) == 3


def test_the_order_of_rows_does_not_matter():
    groups, order = branched(), np.random.default_rng(0).permutation(12)
    shuffled = jax.tree.map(lambda x: x[order], groups)
    np.testing.assert_allclose(credited(shuffled)[0], credited(groups)[0][order], atol=1e-6)


def test_branches_without_a_verdict_part_nothing():
    groups = branched()
    alone = groups.replace(valid=groups.valid & (groups.sample < 2))
    # The completions as a whole, less their mean of 1/2.
    advantage = jnp.zeros(12).at[jnp.array([0, 6])].set(0.5).at[jnp.array([3, 7])].set(-0.5)
    expected = jnp.where(groups.action_mask, advantage[:, None], 0)
    np.testing.assert_allclose(credited(alone)[0], expected, atol=1e-6)


def test_equal_rewards_say_nothing_though_means_of_them_round():
    # The float32 sum of three 0.9 is not 2.7: the first completion's mean would be another than the second's.
    groups = branched()
    level = groups.replace(reward=jnp.where(groups.valid, 0.9, NAN))
    np.testing.assert_array_equal(credited(level)[0], 0)


def test_equal_rewards_say_nothing():
    groups = branched()
    level = groups.replace(reward=jnp.where(groups.valid, 0.3, NAN))
    np.testing.assert_array_equal(credited(level)[0], 0)


def test_counters_are_of_siblings():
    groups = branched()
    count = lambda g: [int(credited(g)[2][name]) for name in ("zero_variance_groups", "group_of_one")]
    assert count(groups) == [0, 0]
    # Three nodes with leaves that are compared, and both prompts: five groups of equal rewards.
    assert count(groups.replace(reward=jnp.where(groups.valid, 0.3, NAN))) == [5, 0]
    # Row 4 is the only branch of its completion with a verdict: without, the completion's rest is alone.
    assert count(groups.replace(valid=groups.valid.at[4].set(False))) == [0, 1]
    # Of the second prompt completion 1 alone is left: an only child, whose end nothing was compared with.
    assert count(groups.replace(valid=groups.valid.at[jnp.array([7, 8])].set(False))) == [0, 1]


@pytest.mark.parametrize(
    "branches, message",
    [(None, r"set Online\.strategy = @Branching\(\)"), ((4, 3), "are 2 and 2, and Branching draws 4 and 3")],
)
def test_other_trees_are_refused(branches, message):
    OBJECTIVE.check(CONFIG, FACTS)
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(CONFIG, FACTS._replace(branches=branches))


def test_a_run_says_how_it_branches():
    recipe = "configs/algos/sibling_grpo.gin"
    jrl.load_config(recipe)
    with pytest.raises(ConfigError, match=r"SiblingGRPO\.first and \.continuations are 3 and 3, and Branching draws 2"):
        jrl.load_config(recipe, ["SiblingGRPO.first=3"])
