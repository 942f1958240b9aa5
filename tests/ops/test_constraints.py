from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from narrow_inputs import check_widens

from jrl.ops import constraints

NAN = float("nan")


def test_every_judge_must_be_satisfied():
    values = jnp.array([[1.0, 1.0, 0.5, 1.0], [1.0, 0.0, 0.5, NAN]])
    got = jax.jit(constraints.satisfied)(values, least=0.5)
    np.testing.assert_array_equal(got, [True, False, True, False])  # a verdict that is missing satisfies nothing
    np.testing.assert_array_equal(constraints.satisfied(jnp.zeros((0, 2)), least=0.5), [True, True])


def test_a_calibrated_and_constrained_reward_by_hand():
    # r = 1.5 against 0.5: sigmoid(1) = 0.73106. Infeasible: 0
    calibrated = jax.jit(constraints.calibrated_reward)(jnp.array([1.5, 1.5, 0.5]), jnp.full(3, 0.5))
    np.testing.assert_allclose(calibrated, [0.73106, 0.73106, 0.5], atol=1e-5)
    feasible = jnp.array([True, False, True])
    got = jax.jit(constraints.constrained_reward)(calibrated, feasible, infeasible_reward=0.0)
    np.testing.assert_allclose(got, [0.73106, 0, 0.5], atol=1e-5)
    # What an infeasible answer scored does not matter, and may be NaN.
    got = constraints.constrained_reward(jnp.array([NAN, 1.0]), jnp.array([False, True]), infeasible_reward=-1.0)
    np.testing.assert_array_equal(got, [-1, 1])
    check_widens(constraints.calibrated_reward, jnp.array([1.3, 0.7]), jnp.array([0.1, 0.9]))
    check_widens(lambda r: constraints.constrained_reward(r, feasible[:2], infeasible_reward=0.1), jnp.ones(2))


def test_a_kl_bounded_reward_by_hand():
    # Log-ratio of the row 2, limit 10: max(1 - 2 / 10, 0) * sigmoid(1) = 0.58485. Masked tokens may be NaN.
    old = jnp.array([[NAN, -1.0, -2.0], [NAN, 0.0, 0.0], [-3.0, NAN, NAN]])
    reference = jnp.array([[NAN, -2.5, -2.5], [NAN, -8.0, -9.0], [-1.0, NAN, NAN]])
    action = jnp.array([[False, True, True], [False, True, True], [True, False, False]])
    reward = jnp.full(3, 0.731058578)
    run = jax.jit(constraints.kl_bounded_reward)
    # The second row is 17 nats likelier, more than the limit: 0. The third is 2 less likely: 1.2 times as much.
    np.testing.assert_allclose(run(reward, old, reference, action, limit=10.0), [0.58485, 0, 0.87727], atol=1e-5)
    same = run(reward, reference, reference, action, limit=10.0)
    np.testing.assert_array_equal(same, reward)


def test_a_bounded_reward_carries_no_gradient():
    total = lambda lp: constraints.kl_bounded_reward(
        jnp.ones(1), lp, jnp.zeros((1, 2)), jnp.ones((1, 2), bool), limit=4.0
    ).sum()
    np.testing.assert_array_equal(jax.grad(total)(jnp.ones((1, 2))), 0)


def test_the_score_of_the_baseline_answer_by_hand():
    # Group 0: its baseline scores 0.5. Group 1 has none.
    score, group = jnp.array([0.5, 1.5, NAN, 3.0]), jnp.array([0, 0, 0, 1], jnp.int32)
    baseline = jnp.array([True, False, False, False])
    found, there = jax.jit(lambda *x: constraints.baseline_score(*x, num_groups=2))(score, baseline, group)
    np.testing.assert_array_equal(found, [0.5, 0.5, 0.5, 0])
    np.testing.assert_array_equal(there, [True, True, True, False])


def test_the_best_feasible_answer_by_hand():
    # Group 0: of the allowed 1 and 3 the second. Group 1: of two that tie the first. Group 2: none is allowed, the
    # fallback. Group 3: nothing. Group 4: the only one that is allowed, and not the fallback.
    score = jnp.array([9.0, 1.0, 3.0, 2.0, 2.0, 1.0, 5.0, 4.0, NAN, 1.0, 0.0])
    group = jnp.array([0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 4], jnp.int32)
    allowed = jnp.array([0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1], bool)
    fallback = jnp.array([1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0], bool)
    sample = jnp.array([0, 1, 2, 1, 2, 0, 0, 1, 0, 0, 1], jnp.int32)
    found = jax.jit(lambda *x: constraints.best_feasible(*x, num_groups=5))(score, allowed, fallback, group, sample)
    np.testing.assert_array_equal(found, [0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 1])
    rest = [x[:6] for x in (allowed, fallback, group, sample)]
    check_widens(lambda s: constraints.best_feasible(s, *rest, num_groups=4), score[:6])


def test_how_far_a_row_has_moved_by_hand():
    old, reference = jnp.array([[NAN, -1.0, -2.0]]), jnp.array([[NAN, -2.5, -2.5]])
    action = jnp.array([[False, True, True]])
    np.testing.assert_allclose(jax.jit(constraints.moved)(old, reference, action), [2.0], rtol=1e-6)
