from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops.gae import gae
from jrl.ops.vtrace import vtrace

NAN = float("nan")
REWARDS, VALUES, WEIGHTS = jnp.array([[0.0, 1.0]]), jnp.array([[0.5, 0.5]]), jnp.array([[2.0, 0.5]])
EVERYTHING = jnp.ones((1, 2), bool)
DEFAULT = {"discount": 1.0, "gae_lambda": 1.0, "max_weight": 1.0, "max_trace": 1.0}


def test_vtrace_by_hand():
    # rho = [1, 0.5]. vs_1 = 0.5 + 0.5 (1 + 0 - 0.5) = 0.75; vs_0 = 0.5 + 1 (0 + 0.5 - 0.5) + 1 (0.75 - 0.5) = 0.75.
    # A_1 = 0.5 (1 + 0 - 0.5) = 0.25; A_0 = 1 (0 + 0.75 - 0.5) = 0.25.
    advantages, targets = jax.jit(vtrace)(REWARDS, VALUES, WEIGHTS, EVERYTHING, **DEFAULT)
    np.testing.assert_allclose(targets, [[0.75, 0.75]], rtol=1e-6)
    np.testing.assert_allclose(advantages, [[0.25, 0.25]], rtol=1e-6)


def test_the_bounds_the_discount_and_lambda_each_have_their_place():
    # max_weight 1.5: rho = [1.5, 0.5]; max_trace 1.2, lambda 0.5: c_0 = 0.6; discount 0.9.
    # vs_1 = 0.75. delta_0 = 1.5 (0 + 0.9 * 0.5 - 0.5) = -0.075; vs_0 = 0.5 - 0.075 + 0.9 * 0.6 * 0.25 = 0.56.
    # A_0 = 1.5 (0.9 * 0.75 - 0.5) = 0.2625.
    options = {"discount": 0.9, "gae_lambda": 0.5, "max_weight": 1.5, "max_trace": 1.2}
    advantages, targets = vtrace(REWARDS, VALUES, WEIGHTS, EVERYTHING, **options)
    np.testing.assert_allclose(targets, [[0.56, 0.75]], rtol=1e-6)
    np.testing.assert_allclose(advantages, [[0.2625, 0.25]], rtol=1e-6)


def test_it_steps_over_a_tools_answer():
    # The example with a tool's token between, whatever stands there; a reward of 0.2 on it is one of the token before:
    # vs_0 = 0.75 + 0.2, A_0 = 0.25 + 0.2. Padding and a row without an action get 0.
    action = jnp.array([[True, False, True, False], [False] * 4])
    wide = lambda x, fill: jnp.array([[x[0, 0], fill, x[0, 1], fill], [fill] * 4])
    run = lambda r: vtrace(r, wide(VALUES, NAN), wide(WEIGHTS, NAN), action, **DEFAULT)
    reward = wide(REWARDS, 0.0)
    advantages, targets = run(reward)
    np.testing.assert_allclose(advantages, [[0.25, 0, 0.25, 0], [0] * 4], rtol=1e-6)
    np.testing.assert_allclose(targets, [[0.75, 0, 0.75, 0], [0] * 4], rtol=1e-6)
    advantages, targets = run(reward.at[0, 1].set(0.2))
    np.testing.assert_allclose(advantages, [[0.45, 0, 0.25, 0], [0] * 4], rtol=1e-6)
    np.testing.assert_allclose(targets, [[0.95, 0, 0.75, 0], [0] * 4], rtol=1e-6)


def test_a_rejected_token_ends_the_trace():
    # The middle token's weight is 0: its value target is its value, and what comes after it does not reach vs_0.
    reward, value = jnp.array([[0.0, 0, 1]]), jnp.array([[0.2, 0.5, 0.6]])
    weights, everything = jnp.array([[1.0, 0, 1]]), jnp.ones((1, 3), bool)
    advantages, targets = vtrace(reward, value, weights, everything, **DEFAULT)
    np.testing.assert_allclose(targets, [[0.5, 0.5, 1]], rtol=1e-6)  # vs_0 = 0.2 + (0.5 - 0.2) + (0.5 - 0.5)
    np.testing.assert_allclose(advantages, [[0.3, 0, 0.4]], rtol=1e-6)


def test_on_policy_the_targets_are_gae_and_the_advantages_use_all_that_follows():
    with jax.enable_x64(True):
        reward, value = jax.random.normal(jax.random.key(0), (2, 3, 6), jnp.float64)
        action = jnp.ones((3, 6), bool).at[1, 2:4].set(False).at[2, 5:].set(False)
        ones = jnp.ones((3, 6), jnp.float64)
        options = DEFAULT | {"discount": 0.9, "gae_lambda": 0.7}
        advantages, targets = vtrace(reward, value, ones, action, **options)
        expected = gae(reward, value, action, discount=0.9, gae_lambda=0.7)
        np.testing.assert_allclose(np.where(action, targets - value, 0), expected, atol=1e-12)
        advantages, _ = vtrace(reward, value, ones, action, **(options | {"gae_lambda": 1.0}))
        expected = gae(reward, value, action, discount=0.9, gae_lambda=1.0)
        np.testing.assert_allclose(advantages, expected, atol=1e-12)
        assert advantages.dtype == targets.dtype == jnp.float64


def test_gradients_follow_the_weights_and_not_what_is_masked():
    # dA_0/dr = [rho_0, rho_0 rho_1] = [1, 0.5]; dA_0/dv = [-1, dvs_1/dv_1] = [-1, 1 - 0.5]. The padding is NaN.
    action = jnp.array([[True, True, False]])
    pad = lambda x, fill: jnp.pad(x, ((0, 0), (0, 1)), constant_values=fill)
    first = lambda r, v: vtrace(r, v, pad(WEIGHTS, NAN), action, **DEFAULT)[0][0, 0]
    of_reward, of_value = jax.grad(first, argnums=(0, 1))(pad(REWARDS, 0.0), pad(VALUES, NAN))
    np.testing.assert_allclose(of_reward[0, :2], [1, 0.5], rtol=1e-6)
    np.testing.assert_allclose(of_value, [[-1, 0.5, 0]], rtol=1e-6)
