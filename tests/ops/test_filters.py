from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import advantages, filters
from jrl.types import Finish

NAN = float("nan")


def has_signal(outcome, group, valid=None):
    valid = jnp.ones(len(outcome), bool) if valid is None else jnp.array(valid)
    fn = jax.jit(filters.has_signal, static_argnames="num_groups")
    return fn(jnp.array(outcome), jnp.array(group, jnp.int32), valid, num_groups=4)


def test_only_groups_of_mixed_outcomes_are_kept():
    # groups [1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0] -> keep [0, 1, 0]
    outcome = [1.0] * 4 + [0.0, 1.0, 0.0, 0.0] + [0.0] * 4
    np.testing.assert_array_equal(
        has_signal(outcome, [0] * 4 + [1] * 4 + [2] * 4), [False] * 4 + [True] * 4 + [False] * 4
    )


def test_shaping_would_keep_what_accuracy_drops():
    np.testing.assert_array_equal(has_signal([1.0, 1.0, 1.0, 1.0], [0] * 4), [False] * 4)
    np.testing.assert_array_equal(has_signal([1.0, 0.9, 1.0, 1.0], [0] * 4), [True] * 4)


def test_rows_without_a_verdict_give_no_signal():
    # group 0: 1 and a missing one; group 1: 1, 0 and a missing one; group 2: one row
    signal = has_signal([1.0, NAN, 1.0, 0.0, NAN, 1.0], [0, 0, 1, 1, 1, 2], [True, False, True, True, False, True])
    np.testing.assert_array_equal(signal, [False, False, True, True, True, False])


def test_a_group_is_kept_where_its_zscores_are_not_zero():
    outcome = jax.random.bernoulli(jax.random.key(0), 0.3, (40,)).astype(jnp.float32)
    group = jnp.arange(40, dtype=jnp.int32) % 10
    signal = filters.has_signal(outcome, group, jnp.ones(40, bool), num_groups=10)
    score = advantages.group_zscore(outcome, group, jnp.ones(40, bool), num_groups=10)
    np.testing.assert_array_equal(signal, score != 0)
    assert signal.any() and not signal.all()


def test_only_rows_cut_at_the_length_limit_are_filtered():
    finish = jnp.array([f.value for f in Finish], jnp.int8)
    got = jax.jit(filters.not_truncated)(finish)
    np.testing.assert_array_equal(got, [f != Finish.LENGTH for f in Finish])


def test_a_truncated_row_stays_in_its_groups_statistics():
    # R = [1, 0, 0, 1], row 2 truncated: its advantage is 0 - 0.5, and it is not trained on
    reward, group = jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.zeros(4, jnp.int32)
    row = advantages.group_centered(reward, group, jnp.ones(4, bool), num_groups=1)
    keep = filters.not_truncated(jnp.array([0, 0, Finish.LENGTH, 0], jnp.int8))
    np.testing.assert_array_equal(row, [0.5, -0.5, -0.5, 0.5])
    np.testing.assert_array_equal(keep, [True, True, False, True])
