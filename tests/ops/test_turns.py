from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import advantages, turns
from jrl.ops.gae import gae

NAN = float("nan")
run = jax.jit(turns.turn_advantages, static_argnames="num_groups")
ONE = jnp.zeros(2, jnp.int32)


def test_turn_advantages_by_hand():
    # Rewards [0, 1] and [1, 0]: returns [1, 1] and [1, 0]; turn 0 has mean 1, turn 1 mean 0.5.
    reward, rows = jnp.array([[0.0, 1.0], [1.0, 0.0]]), jnp.ones(2, bool)
    found = run(reward, jnp.ones((2, 2), bool), ONE, rows, discount=1.0, num_groups=1)
    np.testing.assert_allclose(found, [[0, 0.5], [0, -0.5]], atol=1e-7)
    # discount 0.5: returns [0.5, 1] and [1, 0]; discount 0, each turn for itself: the rewards alone.
    found = run(reward, jnp.ones((2, 2), bool), ONE, rows, discount=0.5, num_groups=1)
    np.testing.assert_allclose(found, [[-0.25, 0.5], [0.25, -0.5]], atol=1e-7)
    found = run(reward, jnp.ones((2, 2), bool), ONE, rows, discount=0.0, num_groups=1)
    np.testing.assert_allclose(found, [[-0.5, 0.5], [0.5, -0.5]], atol=1e-7)


def test_a_row_with_fewer_turns_is_absent_from_later_ones():
    # Turn 0: returns 3, 0, 1 of mean 4/3. Turn 1: 2 and 1, of mean 1.5. Turn 2: one row alone has it. A row without a
    # verdict is in none.
    reward = jnp.array([[1.0, 1.0, 1.0], [0.0, NAN, NAN], [0.0, 1.0, NAN], [NAN, NAN, NAN]])
    present = jnp.array([[True, True, True], [True, False, False], [True, True, False], [True, True, True]])
    valid = jnp.array([True, True, True, False])
    found = run(reward, present, jnp.zeros(4, jnp.int32), valid, discount=1.0, num_groups=1)
    np.testing.assert_allclose(found, [[5 / 3, 0.5, 0], [-4 / 3, 0, 0], [-1 / 3, -0.5, 0], [0, 0, 0]], atol=1e-6)


def test_groups_are_apart_and_order_does_not_matter():
    with jax.enable_x64(True):
        reward = jax.random.normal(jax.random.key(0), (6, 3), jnp.float64)
        group, present = jnp.array([0, 1, 0, 1, 0, 1], jnp.int32), jnp.ones((6, 3), bool).at[4, 2].set(False)
        rows = jnp.ones(6, bool)
        found = turns.turn_advantages(reward, present, group, rows, discount=0.9, num_groups=2)
        for which in range(2):
            at = np.flatnonzero(group == which)
            alone = turns.turn_advantages(reward[at], present[at], group[at] * 0, rows[at], discount=0.9, num_groups=1)
            np.testing.assert_allclose(found[at], alone, atol=1e-12)
        order = jnp.array([5, 2, 0, 3, 1, 4])
        shuffled = turns.turn_advantages(reward[order], present[order], group[order], rows, discount=0.9, num_groups=2)
        np.testing.assert_allclose(shuffled, found[order], atol=1e-12)


def test_one_turn_is_a_row_less_the_mean_of_its_group():
    reward, group = jnp.array([[4.0], [0.0], [2.0]]), jnp.zeros(3, jnp.int32)
    found = run(reward, jnp.ones((3, 1), bool), group, jnp.ones(3, bool), discount=1.0, num_groups=1)
    np.testing.assert_allclose(
        found[:, 0], advantages.group_centered(reward[:, 0], group, jnp.ones(3, bool), num_groups=1), rtol=1e-6
    )


def test_gae_runs_over_turns():
    # Turn rewards [0, 1], turn values [0.3, 0.7], lambda 0.95: A_1 = 1 - 0.7; A_0 = 0.7 - 0.3 + 0.95 * 0.3. The row
    # has two turns of three.
    found = gae(
        jnp.array([[0.0, 1.0, 0.0]]), jnp.array([[0.3, 0.7, NAN]]), jnp.array([[True, True, False]]),
        discount=1.0, gae_lambda=0.95,
    )  # fmt: skip
    np.testing.assert_allclose(found, [[0.685, 0.3, 0]], rtol=1e-6)


def test_spread_turns_puts_a_turn_on_its_sampled_tokens():
    advantage = jnp.array([[1.0, -2.0], [3.0, 4.0]])
    turn = jnp.array([[0, 0, 1, 1], [0, 1, 1, 9]], jnp.int8)
    action = jnp.array([[True, False, True, True], [True, True, False, False]])
    found = jax.jit(turns.spread_turns)(advantage, turn, action)
    np.testing.assert_array_equal(found, [[1, 0, -2, -2], [3, 4, 0, 0]])


def test_gradients_reach_the_turns_that_follow():
    # a_00 = (r_00 + 0.5 r_01) - mean: d/dr = [[0.5, 0.25], [-0.5, -0.25]]; nothing to the row without a verdict
    reward = jnp.array([[0.0, 1.0], [1.0, 0.0], [NAN, NAN]])
    valid = jnp.array([True, True, False])
    first = lambda r: turns.turn_advantages(
        r, jnp.ones((3, 2), bool), jnp.zeros(3, jnp.int32), valid, discount=0.5, num_groups=1
    )[0, 0]
    np.testing.assert_allclose(jax.grad(first)(reward), [[0.5, 0.25], [-0.5, -0.25], [0, 0]], rtol=1e-6)
