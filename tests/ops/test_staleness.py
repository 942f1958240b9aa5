"""How old tokens and rows are, and the bound on it (S12)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops.staleness import row_staleness, rows_to_start, token_staleness

# Partial rollouts of at most 4 tokens a step, begun at version 7; after them a token that the policy did not sample.
VERSIONS = np.array([[7] * 4 + [8] * 4 + [9] * 2 + [-1], [9] * 3 + [-1] * 8, [-1] * 11], np.int32)
ACTIONS = VERSIONS >= 0


def test_staleness_by_hand():
    # 9 - 7 = 2, 9 - 8 = 1, 9 - 9 = 0; the version of what was not sampled does not count.
    by_token = jax.jit(token_staleness)(jnp.int32(9), VERSIONS, ACTIONS)
    assert by_token.tolist() == [[2] * 4 + [1] * 4 + [0] * 2 + [0], [0] * 11, [0] * 11]
    assert jax.jit(row_staleness)(jnp.int32(9), VERSIONS, ACTIONS).tolist() == [2, 0, 0]
    assert jax.jit(row_staleness)(jnp.int32(12), VERSIONS, ACTIONS).tolist() == [5, 3, 0]
    assert row_staleness(jnp.int32(12), VERSIONS[None], ACTIONS[None]).tolist() == [[5, 3, 0]]


@pytest.mark.parametrize(("lag", "expected"), [(1, 3), (0, -1)])
def test_rows_to_start_by_hand(lag, expected):
    # min(8 - 3, (1 + 2 + 1) * 4 - (10 + 3)) = min(5, 3); without lag min(5, (0 + 2 + 1) * 4 - 13) = -1: none.
    assert rows_to_start(2, 10, 3, lag=lag, batch=4, most_running=8) == expected
    assert rows_to_start(2, 0, 3, lag=lag, batch=4, most_running=8) == 8 - 3


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_queue_of_lag_draws_fills_the_bound_and_no_row_exceeds_it(lag):
    batch, queue = 4, []
    for version in range(6):
        started = version * batch + sum(map(len, queue))
        due = rows_to_start(version, started, 0, lag=lag, batch=batch, most_running=10**9)
        assert due == (lag + 1 if version == 0 else 1) * batch  # what Online draws: the whole queue, then one a step
        queue += [[version] * batch] * (due // batch)
        assert queue.pop(0) == [max(0, version - lag)] * batch
