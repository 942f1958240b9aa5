from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import groups, tree

NAN = float("nan")


# A17


def test_step_advantages_by_hand():
    # Q = 0.5, 0.75, 0.25: 0.25 and -0.5
    run = jax.jit(tree.step_advantages, static_argnames="rollouts")
    found = run(jnp.array([[0.5, 0.75, 0.25]]), jnp.ones((1, 3), bool), rollouts=4)
    np.testing.assert_allclose(found, [[0.25, -0.5]], rtol=1e-6)


def test_a_difference_below_one_rollout_is_noise():
    # 10 rollouts: 0.3 - 0.2 is one of them, however it is rounded; 0.05 is half of one. With 20 it counts.
    success, estimated = jnp.array([[0.2, 0.3, 0.35, 0.3]]), jnp.ones((1, 4), bool)
    np.testing.assert_allclose(tree.step_advantages(success, estimated, rollouts=10), [[0.1, 0, 0]], rtol=1e-5)
    np.testing.assert_allclose(tree.step_advantages(success, estimated, rollouts=20), [[0.1, 0.05, -0.05]], rtol=1e-5)
    for up in range(10):  # every single rollout of ten counts
        pair = jnp.array([[up / 10, (up + 1) / 10], [(up + 1) / 10, up / 10]])
        found = tree.step_advantages(pair, jnp.ones((2, 2), bool), rollouts=10)
        np.testing.assert_allclose(found, [[0.1], [-0.1]], rtol=1e-5)


def test_a_step_without_an_estimate_before_or_after_it_gets_zero():
    estimated = jnp.array([[True, True, False, True], [True, True, True, False]])
    success = jnp.where(estimated, jnp.array([[0.0, 1.0, 0.5, 1.0], [1.0, 0.0, 1.0, 0.5]]), NAN)
    np.testing.assert_array_equal(tree.step_advantages(success, estimated, rollouts=2), [[1, 0, 0], [-1, 1, 0]])


def test_steps_sum_to_what_the_answer_changed():
    with jax.enable_x64(True):
        success = jax.random.randint(jax.random.key(0), (3, 6), 0, 9) / 8
        found = tree.step_advantages(success, jnp.ones((3, 6), bool), rollouts=8)
        np.testing.assert_allclose(found.sum(axis=1), success[:, -1] - success[:, 0], atol=1e-12)


def test_the_value_of_a_prefix_is_a_mean_by_prefix():
    # Rollouts of prefixes 0, 1, 1, 0, 1; one of the last has no verdict: 0.5 and 1
    reward, prefix = jnp.array([1.0, 1.0, NAN, 0.0, 1.0]), jnp.array([0, 1, 1, 0, 1], jnp.int32)
    found = groups.mean(reward, prefix, ~jnp.isnan(reward), num_groups=2)
    np.testing.assert_allclose(tree.step_advantages(found[None], jnp.ones((1, 2), bool), rollouts=2), [[0.5]])


def test_gradient_of_a_step_is_the_difference_of_its_ends():
    estimated = jnp.array([[True, True, False]])
    first = lambda q: tree.step_advantages(q, estimated, rollouts=4)[0, 0]
    np.testing.assert_array_equal(jax.grad(first)(jnp.array([[0.5, 1.0, NAN]])), [[-1, 1, 0]])


# A18


def test_sibling_advantages_by_hand():
    # Children of node 0: 1, 0.5, 0, of mean 0.5. Node 1 has one child, node 2 two of equal value. The root has none.
    value = jnp.array([1.0, 0.7, 0.5, 0.0, 0.1, 0.1, NAN])
    parent = jnp.array([0, 1, 0, 0, 2, 2, 0], jnp.int32)
    run = jax.jit(tree.sibling_advantages, static_argnames="num_nodes")
    found = run(value, parent, ~jnp.isnan(value), num_nodes=3)
    np.testing.assert_allclose(found, [0.5, 0, 0, -0.5, 0, 0, 0], atol=1e-7)


def test_siblings_sum_to_zero_under_every_parent():
    with jax.enable_x64(True):
        value = jax.random.normal(jax.random.key(1), (12,), jnp.float64)
        parent = jnp.arange(12, dtype=jnp.int32) % 5
        found = tree.sibling_advantages(value, parent, jnp.ones(12, bool), num_nodes=5)
        total = groups.total(found, parent, jnp.ones(12, bool), num_groups=5)
        np.testing.assert_allclose(total, np.zeros(5), atol=1e-12)
        assert jnp.all(found != 0)


def test_gradient_of_a_sibling():
    value, valid = jnp.array([1.0, 0.0, NAN]), jnp.array([True, True, False])
    first = lambda v: tree.sibling_advantages(v, jnp.zeros(3, jnp.int32), valid, num_nodes=1)[0]
    np.testing.assert_allclose(jax.grad(first)(value), [0.5, -0.5, 0], rtol=1e-6)


def test_spread_nodes_puts_a_branch_on_its_own_tokens():
    # Two rows that share branch 0 and then part.
    node, action = (
        jnp.array([[0, 0, 1, 9], [0, 0, 2, 2]], jnp.int32),
        jnp.array([[True, True, True, False], [True] * 4]),
    )
    found = jax.jit(tree.spread_nodes)(jnp.array([0.0, 0.5, -0.5]), node, action)
    np.testing.assert_array_equal(found, [[0, 0, 0.5, 0], [0, 0, -0.5, -0.5]])
