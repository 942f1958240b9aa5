from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from narrow_inputs import check_widens

from jrl.ops import gated_reward

NAN = float("nan")


def test_a_gated_reward_by_hand():
    # o = 0.8 and verbosity 0.2, lam 0.5 and 1, gate 0.75 and 0.25:
    # 0.75 * (0.8 - 0.5 * 0.2) + 0.25 * (0.2 - 1 * 0.2) = 0.525
    objectives = jnp.array([[0.8, 0.2]])
    freed = jax.jit(functools.partial(gated_reward.decorrelated, verbosity=1))(objectives, jnp.array([0.5, 1.0]))
    np.testing.assert_allclose(freed, [[0.7, 0]], atol=1e-7)
    # A gate of 0.75 and 0.25 is a logit of log 3 at temperature 1, 10 log 3 at 10.
    gate = jax.jit(gated_reward.gate_weights)(jnp.array([[10 * np.log(3), 0.0]]), temperature=10.0)
    np.testing.assert_allclose(gate, [[0.75, 0.25]], rtol=1e-6)
    np.testing.assert_allclose(jax.jit(gated_reward.gated_reward)(freed, gate), [0.525], rtol=1e-6)
    check_widens(lambda o, lam: gated_reward.decorrelated(o, lam, verbosity=1), objectives, jnp.array([0.3, 1.0]))
    check_widens(lambda z: gated_reward.gate_weights(z, temperature=3.0), jnp.array([[0.7, -0.3]]))
    check_widens(gated_reward.gated_reward, objectives, gate)


def test_equal_logits_are_the_mean_of_the_objectives_and_the_gates_gradient_is_a_softmaxs():
    objectives, logits = jnp.array([[1.0, 2.0, 6.0]]), jnp.zeros((1, 3))
    value = lambda z: gated_reward.gated_reward(objectives, gated_reward.gate_weights(z, temperature=2.0))[0]
    np.testing.assert_allclose(value(logits), 3, rtol=1e-6)
    # d/dz_k = g_k (o_k - R) / temperature = (1/3) (o_k - 3) / 2
    np.testing.assert_allclose(jax.grad(value)(logits)[0], [-1 / 3, -1 / 6, 1 / 2], rtol=1e-5)


def test_rank_correlation_by_hand():
    run = jax.jit(gated_reward.spearman)
    assert float(run(jnp.array([1.0, 5.0, 9.0]), jnp.array([2.0, 3.0, 40.0]))) == 1
    assert float(run(jnp.array([1.0, 5.0, 9.0]), jnp.array([3.0, 2.0, 1.0]))) == -1
    # Ranks 0, 1.5, 1.5, 3 and 0, 1, 2, 3: cov 4.5; 4.5 / sqrt(4.5 * 5) = 0.948683
    np.testing.assert_allclose(run(jnp.array([0.0, 4.0, 4.0, 9.0]), jnp.arange(4.0)), 0.948683, atol=1e-6)
    assert float(run(jnp.ones(3), jnp.arange(3.0))) == 0
    assert float(run(jnp.array([1.0, 5.0]), jnp.array([2.0, 3.0]))) == 1  # ranks -0.5 and 0.5: 0.5 / 0.5
    assert gated_reward.spearman(jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.bfloat16)).dtype == jnp.float32


def test_the_smallest_coefficient_that_frees_an_objective_of_length_is_taken():
    length = jnp.arange(6.0)
    # The first is length itself: only lam = 1 leaves nothing. The second runs against it: 0 is enough. The third is
    # half of it, and lam = 0.5 is. The fourth grows faster than any candidate takes away: 1.
    objectives = jnp.stack([length, -length, 0.5 * length, 3 * length], axis=1)
    run = jax.jit(functools.partial(gated_reward.verbosity_coefficients, verbosity=0, threshold=0.028))
    np.testing.assert_allclose(run(objectives, jnp.array([0.0, 0.25, 0.5, 0.75])), [1, 0, 0.5, 1])


def test_ridge_regression_is_that_of_numpy_and_skips_labels_that_are_missing():
    with jax.enable_x64(True):
        hidden = jax.random.normal(jax.random.key(0), (12, 3), jnp.float64)
        labels = np.array(hidden @ jnp.array([[1.0, 0.0], [2.0, -1.0], [0.0, 3.0]]) + jnp.array([[4.0, -5.0]]))
        w, b = jax.jit(gated_reward.ridge_head)(hidden, labels, penalty=1e-12)
        np.testing.assert_allclose(w, [[1, 0], [2, -1], [0, 3]], atol=1e-9)
        np.testing.assert_allclose(b, [4, -5], atol=1e-9)
        labels[::2, 0] = NAN
        labels[1:, 1] = NAN  # one label alone is the bias
        w, b = gated_reward.ridge_head(hidden, labels, penalty=0.7)
        x = np.asarray(hidden)[1::2]
        # The bias as a column of ones whose penalty is 0.
        design = np.concatenate([x, np.ones((6, 1))], 1)
        solved = np.linalg.solve(design.T @ design + 0.7 * np.diag([1, 1, 1, 0]), design.T @ labels[1::2, 0])
        np.testing.assert_allclose([*w[:, 0], b[0]], solved, rtol=1e-10)
        np.testing.assert_allclose([*w[:, 1], b[1]], [0, 0, 0, labels[0, 1]], atol=1e-12)
    w, b = gated_reward.ridge_head(jnp.ones((2, 3), jnp.bfloat16), jnp.ones((2, 1)), penalty=1.0)
    assert w.dtype == b.dtype == jnp.float32
