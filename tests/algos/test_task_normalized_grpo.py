"""Advantages in deviations of their task, by hand through the row; and how a batch's rows are told apart by task."""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts, Groups, Needs
from jrl.algos.task_normalized_grpo import TaskNormalizedGRPO
from jrl.compatibility import check_needs
from jrl.ops import reduce
from jrl.ops.groups import first_group
from jrl.resolve import load_config
from jrl.rollout.collect import task_hashes
from jrl.types import Finish

OBJECTIVE = ALGOS["TaskNormalizedGRPO"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def two_tasks(scale=1.0):
    """Returns a prompt of two rows of one task, with rewards 1 and 0, and two prompts of two rows of another one, with
    0 and 4 and with 2 and 2 times `scale`; and a row without a verdict. Rows have a token, but the first has two."""
    count = 7
    mask = jnp.zeros((count, 3), bool).at[:, 1].set(True).at[0, 2].set(True)
    return Groups(
        reward=jnp.array([1, 0, 0, 4 * scale, 2 * scale, 2 * scale, jnp.nan]),
        outcome=jnp.array([1.0, 0, 0, 1, 1, 1, jnp.nan]),
        valid=jnp.arange(count) < 6,
        group=jnp.array([0, 0, 1, 1, 2, 2, 2], jnp.int32),
        action_mask=mask,
        finish=jnp.full(count, Finish.STOP_TOKEN, jnp.int8),
        num_groups=3,
        max_completion=3,
        task=jnp.array([0, 0, 1, 1, 1, 1, 1], jnp.int32),
    )


def advantages_of(groups):
    return jax.jit(OBJECTIVE.advantages)(TaskNormalizedGRPO(), groups, groups.reward, ())[0]


def test_advantages_by_hand():
    # Task 0: tokens 0.5, 0.5, -0.5, mean 1/6, squares (1/9 + 1/9 + 4/9) / 2 = 1/3: 1/3 / sqrt(1/3) = 0.5773503 twice,
    # and -2/3 / sqrt(1/3) = -1.1547005.
    # Task 1: tokens -2, 2, 0, 0, mean 0, squares 8 / 3: -+2 / sqrt(8/3) = -+1.2247449, and 0.
    a, b, c = 0.5773503, 1.1547005, 1.2247449
    expected = [[0, a, a], [0, -b, 0], [0, -c, 0], [0, c, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    np.testing.assert_allclose(advantages_of(two_tasks()), expected, atol=1e-6)


def test_the_scale_of_a_tasks_rewards_changes_nothing():
    """Whitened over the step the task of large rewards would have drowned the other."""
    scaled = two_tasks(100.0)
    np.testing.assert_allclose(advantages_of(scaled), advantages_of(two_tasks()), atol=1e-6)
    together = advantages_of(scaled.replace(task=jnp.zeros(7, jnp.int32)))
    assert jnp.abs(together[0]).max() < 0.05 < jnp.abs(advantages_of(scaled)[0]).max()


def test_one_task_is_whitened_over_the_step():
    groups = sample_groups().replace(task=jnp.full(12, 1, jnp.int32))
    found = advantages_of(groups)
    counts = groups.valid[:, None] & groups.action_mask
    centered, _, _ = ALGOS["DrGRPO"].advantages(ALGOS["DrGRPO"].config(), groups, groups.reward, ())
    np.testing.assert_allclose(found, reduce.whiten(centered, counts), atol=1e-6)


def test_a_task_without_signal_has_advantage_zero():
    groups = two_tasks()
    groups = groups.replace(reward=groups.reward.at[:2].set(0.1))
    found = advantages_of(groups)
    assert jnp.all(found[:2] == 0) and jnp.any(found[2:] != 0)


def test_labels_of_rows_become_the_smallest_group_of_their_task():
    label, group = jnp.array([7, 9, 7, 9, 4], jnp.uint32), jnp.array([2, 1, 3, 0, 4], jnp.int32)
    found = jax.jit(first_group, static_argnames="num_groups")(label, group, num_groups=5)
    np.testing.assert_array_equal(found, [2, 0, 2, 0, 4])
    order = jnp.array([4, 2, 0, 3, 1])
    np.testing.assert_array_equal(first_group(label[order], group[order], num_groups=5), found[order])


def test_every_row_has_the_hash_of_its_prompts_task():
    visits = [SimpleNamespace(example=SimpleNamespace(task=name)) for name in ("sums", "", "sums")]
    sums, none = zlib.crc32(b"sums"), zlib.crc32(b"")
    found = task_hashes(visits, 2, 8)
    assert found.dtype == np.uint32 and none == 0
    np.testing.assert_array_equal(found, [sums, sums, none, none, sums, sums, 0, 0])


@pytest.mark.parametrize("asked", [{"task": True}, {"staleness": True}, {"examples": 9}])
def test_stored_rows_have_neither_a_task_nor_an_age_nor_an_example(asked):
    config, _ = load_config("configs/algos/toy.gin")
    warm, rl = config.stages
    row = ALGOS["SFT"]._replace(needs=lambda config: Needs(**asked))
    with pytest.raises(ValueError, match=rf"SFT reads what only samples have \(Needs\.{next(iter(asked))}\)"):
        check_needs(warm, row, config, {})
    check_needs(rl, row, config, {})


def test_illegal_settings_are_refused():
    with pytest.raises(ValueError, match=r"TaskNormalizedGRPO\.clip_low = 1\.0"):
        OBJECTIVE.check(TaskNormalizedGRPO(clip_low=1.0), FACTS)
    with pytest.raises(ValueError, match="at least 2 of them, got samples=1"):
        OBJECTIVE.check(TaskNormalizedGRPO(), FACTS._replace(samples=1))
