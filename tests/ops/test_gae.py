from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import advantages, gae

NAN = float("nan")

# A13

REWARDS, VALUES = jnp.array([[0.0, 0.0, 1.0]]), jnp.array([[0.2, 0.5, 0.6]])


def test_gae_by_hand():
    # A_2 = 1 - 0.6 = 0.4; A_1 = (0 + 0.6 - 0.5) + 0.95 * 0.4 = 0.48; A_0 = (0 + 0.5 - 0.2) + 0.95 * 0.48 = 0.756
    # discount 0.9: A_2 = 0.4; A_1 = 0.54 - 0.5 + 0.9 * 0.95 * 0.4 = 0.382; A_0 = 0.45 - 0.2 + 0.855 * 0.382 = 0.57661
    run = jax.jit(gae.gae)
    everything = jnp.ones((1, 3), bool)
    found = run(REWARDS, VALUES, everything, discount=1.0, gae_lambda=0.95)
    np.testing.assert_allclose(found, [[0.756, 0.48, 0.4]], 1e-6)
    found = run(REWARDS, VALUES, everything, discount=0.9, gae_lambda=0.95)
    np.testing.assert_allclose(found, [[0.57661, 0.382, 0.4]], rtol=1e-6)
    one = run(jnp.array([[1.0]]), jnp.array([[0.3]]), jnp.ones((1, 1), bool), discount=1.0, gae_lambda=0.95)
    np.testing.assert_allclose(one, [[0.7]], rtol=1e-6)  # a single token: r - v


def test_gae_steps_over_a_tools_answer():
    # The middle is a tool's: A_2 = 0.4, A_0 = (0 + 0.6 - 0.2) + 0.95 * 0.4 = 0.78. What stands there may be NaN.
    action = jnp.array([[True, False, True]])
    run = jax.jit(lambda r, v: gae.gae(r, v, action, discount=1.0, gae_lambda=0.95))
    np.testing.assert_allclose(run(REWARDS, VALUES.at[0, 1].set(NAN)), [[0.78, 0, 0.4]], rtol=1e-6)
    # A reward of 0.5 on the tool's token is one of the token before it: 0.78 + 0.5.
    np.testing.assert_allclose(run(REWARDS.at[0, 1].set(0.5), VALUES), [[1.28, 0, 0.4]], rtol=1e-6)


def test_gae_of_padding_and_of_rows_without_an_action_is_zero():
    # Row 0: two actions after a prompt, then padding: A_2 = 1 - 0.6, A_1 = 0.6 - 0.5 + 0.95 * 0.4.
    action = jnp.array([[False, True, True, False], [False] * 4])
    reward, value = jnp.array([[0.0, 0, 1, 0], [0.0, 0, 1, 0]]), jnp.array([[9.0, 0.5, 0.6, NAN]] * 2)
    found = gae.gae(reward, value, action, discount=1.0, gae_lambda=0.95)
    np.testing.assert_allclose(found, [[0, 0.48, 0.4, 0], [0] * 4], rtol=1e-6)


def test_gae_is_the_return_less_the_value_or_the_error_of_one_step():
    with jax.enable_x64(True):
        reward, value = jax.random.normal(jax.random.key(0), (2, 3, 7), jnp.float64)
        action = jnp.ones((3, 7), bool).at[1, 2:4].set(False).at[2, 5:].set(False)
        reward = jnp.where(action, reward, 0)
        returns = advantages.discounted_returns(reward, action, discount=0.9)
        full = gae.gae(reward, value, action, discount=0.9, gae_lambda=1.0)
        np.testing.assert_allclose(full, np.where(action, returns - value, 0), atol=1e-12)
        steps = gae.gae(reward, value, action, discount=0.9, gae_lambda=0.0)
        for row in range(3):
            at = np.flatnonzero(action[row])
            following = np.append(np.asarray(value[row, at[1:]]), 0)
            np.testing.assert_allclose(steps[row, at], reward[row, at] + 0.9 * following - value[row, at], atol=1e-12)


def test_gae_takes_a_lambda_for_every_row():
    # The second row at lambda 0.5: A_1 = 0.1 + 0.5 * 0.4 = 0.3; A_0 = 0.3 + 0.5 * 0.3 = 0.45
    both = lambda x: jnp.concatenate([x, x])
    found = gae.gae(
        both(REWARDS), both(VALUES), jnp.ones((2, 3), bool), discount=1.0, gae_lambda=jnp.array([0.95, 0.5])
    )
    np.testing.assert_allclose(found, [[0.756, 0.48, 0.4], [0.45, 0.3, 0.4]], rtol=1e-6)


def test_gradient_of_gae_is_how_far_a_reward_reaches():
    # dA_0/dr = [1, (0.9 * 0.5), (0.9 * 0.5)^2]; dA_0/dv = [-1, 0.9 - 0.45, 0.45 * (0.9 - 0.45)]
    everything = jnp.ones((1, 3), bool)
    first = lambda r, v: gae.gae(r, v, everything, discount=0.9, gae_lambda=0.5)[0, 0]
    of_reward, of_value = jax.grad(first, argnums=(0, 1))(REWARDS, VALUES)
    np.testing.assert_allclose(of_reward, [[1, 0.45, 0.2025]], rtol=1e-6)
    np.testing.assert_allclose(of_value, [[-1, 0.45, 0.2025]], rtol=1e-6)


# A14


def test_length_adaptive_lambda_by_hand():
    # 100 tokens: 1 - 1 / (0.05 * 100) = 0.8; 40: 1 - 1 / 2 = 0.5; 20: 0; 10: 1 - 2 = -1, so 0; none: 0
    length = jnp.array([100, 40, 20, 10, 0])
    action = jnp.arange(120)[None, :] % 120 < length[:, None]
    found = jax.jit(gae.length_adaptive_lambda)(action, alpha=0.05)
    np.testing.assert_allclose(found, [0.8, 0.5, 0, 0, 0], atol=1e-6)


def test_length_adaptive_lambda_counts_sampled_tokens_only():
    # 4 sampled tokens among 9: 1 - 1 / (0.5 * 4) = 0.5
    action = jnp.array([[False, True, True, False, False, True, False, True, False]])
    np.testing.assert_allclose(gae.length_adaptive_lambda(action, alpha=0.5), [0.5], rtol=1e-6)


def test_length_adaptive_lambda_weighs_alpha_times_length_tokens():
    # The sum of lambda^k over all k is 1 / (1 - lambda) = alpha * length.
    with jax.enable_x64(True):
        found = gae.length_adaptive_lambda(jnp.ones((1, 1000), bool), alpha=0.05)
        assert found.dtype == jnp.float64
        np.testing.assert_allclose(1 / (1 - found), [50], rtol=1e-12)


def test_decoupled_gae_by_hand():
    # Policy, lambda 0.5: A_2 = 1 - 0.6 = 0.4; A_1 = 0.1 + 0.5 * 0.4 = 0.3; A_0 = 0.3 + 0.5 * 0.3 = 0.45.
    # Critic, lambda 1: the return, 1 on every token. Critic, lambda 0.95: A = 0.756, 0.48, 0.4, plus the values.
    everything = jnp.ones((1, 3), bool)
    run = jax.jit(gae.decoupled_gae)
    policy, returns = run(REWARDS, VALUES, everything, discount=1.0, policy_lambda=0.5, critic_lambda=1.0)
    np.testing.assert_allclose(policy, [[0.45, 0.3, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(returns, [[1, 1, 1]], rtol=1e-6)
    _, returns = run(REWARDS, VALUES, everything, discount=1.0, policy_lambda=0.5, critic_lambda=0.95)
    np.testing.assert_allclose(returns, [[0.956, 0.98, 1.0]], rtol=1e-6)


def test_decoupled_gae_leaves_out_what_was_not_sampled():
    action = jnp.array([[True, False, True]])
    policy, returns = gae.decoupled_gae(
        REWARDS, VALUES.at[0, 1].set(NAN), action, discount=1.0, policy_lambda=0.95, critic_lambda=1.0
    )
    np.testing.assert_allclose(policy, [[0.78, 0, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(returns, [[1, 0, 1]], rtol=1e-6)


def test_coupled_lambdas_give_targets_of_the_policys_own_advantages():
    with jax.enable_x64(True):
        reward, value = jax.random.normal(jax.random.key(2), (2, 3, 6), jnp.float64)
        everything = jnp.ones((3, 6), bool)
        policy, returns = gae.decoupled_gae(
            reward, value, everything, discount=0.9, policy_lambda=0.8, critic_lambda=0.8
        )
        np.testing.assert_allclose(returns - value, policy, atol=1e-12)


# A15

MACRO_REWARDS, MACRO_VALUES = jnp.array([[0.0, 0, 0, 1]]), jnp.array([[0.2, 0.4, 0.6, 0.8]])


def test_macro_gae_by_hand():
    # Macros of two: values 0.3 and 0.7. The last: 1 - 0.7 = 0.3; the first: 0 + 0.7 - 0.3 + 0.95 * 0.3 = 0.685.
    # Returns: 0.3 + 0.7 = 1 and 0.685 + 0.3 = 0.985.
    everything = jnp.ones((1, 4), bool)

    @jax.jit
    def run(reward, value):
        starts = gae.ngram_starts(everything, size=2)
        return gae.macro_gae(reward, value, everything, starts, discount=1.0, gae_lambda=0.95)

    found, returns = run(MACRO_REWARDS, MACRO_VALUES)
    np.testing.assert_allclose(found, [[0.685, 0.685, 0.3, 0.3]], rtol=1e-6)
    np.testing.assert_allclose(returns, [[0.985, 0.985, 1, 1]], rtol=1e-6)
    # Rewards of a macro's tokens are summed: 0.5 on each of the first two adds 1 to the first macro.
    found, _ = run(MACRO_REWARDS.at[0, :2].set(0.5), MACRO_VALUES)
    np.testing.assert_allclose(found, [[1.685, 1.685, 0.3, 0.3]], rtol=1e-6)


def test_discount_counts_macros():
    # discount 0.9: the first macro 0.9 * 0.7 - 0.3 + 0.9 * 0.95 * 0.3 = 0.5865
    everything = jnp.ones((1, 4), bool)
    starts = gae.ngram_starts(everything, size=2)
    found, _ = gae.macro_gae(MACRO_REWARDS, MACRO_VALUES, everything, starts, discount=0.9, gae_lambda=0.95)
    np.testing.assert_allclose(found, [[0.5865, 0.5865, 0.3, 0.3]], rtol=1e-6)


def test_a_macro_never_spans_a_tools_answer():
    # Sampled: 3 tokens, a tool's two, 2 tokens, padding. Macros of two: [0, 1], [2], [5, 6].
    action = jnp.array([[True, True, True, False, False, True, True, False]])
    starts = jax.jit(gae.ngram_starts, static_argnames="size")(action, size=2)
    np.testing.assert_array_equal(starts, [[True, False, True, False, False, True, False, False]])
    # Values 0.3, 0.5, 0.7: A = 1 - 0.7 = 0.3; 0.7 - 0.5 + 0.3 = 0.5; 0.5 - 0.3 + 0.5 = 0.7 (lambda 1).
    value = jnp.array([[0.2, 0.4, 0.5, NAN, NAN, 0.6, 0.8, NAN]])
    reward = jnp.zeros((1, 8)).at[0, 6].set(1)
    run = lambda r: gae.macro_gae(r, value, action, starts, discount=1.0, gae_lambda=1.0)
    np.testing.assert_allclose(run(reward)[0], [[0.7, 0.7, 0.5, 0, 0, 0.3, 0.3, 0]], rtol=1e-6)
    np.testing.assert_allclose(run(reward)[1], [[1, 1, 1, 0, 0, 1, 1, 0]], rtol=1e-6)
    # A reward on the tool's tokens counts for the macro before them.
    np.testing.assert_allclose(run(reward.at[0, 4].set(2))[0], [[2.7, 2.7, 2.5, 0, 0, 0.3, 0.3, 0]], rtol=1e-6)


def test_macros_of_a_row_without_an_action_are_zero_and_stay_out_of_other_rows():
    action = jnp.array([[False] * 4, [False, True, True, True]])
    starts = gae.ngram_starts(action, size=2)
    np.testing.assert_array_equal(starts, [[False] * 4, [False, True, False, True]])
    value = jnp.array([[NAN] * 4, [NAN, 0.2, 0.4, 0.6]])
    reward = jnp.array([[0.0, 0, 0, 5], [0, 0, 0, 1]])
    found, returns = gae.macro_gae(reward, value, action, starts, discount=1.0, gae_lambda=1.0)
    np.testing.assert_allclose(found, [[0] * 4, [0, 0.7, 0.7, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(returns, [[0] * 4, [0, 1, 1, 1]], rtol=1e-6)


def test_macros_of_one_token_are_gae_and_one_macro_is_the_reward_less_the_value():
    with jax.enable_x64(True):
        reward, value = jax.random.normal(jax.random.key(1), (2, 3, 7), jnp.float64)
        action = jnp.ones((3, 7), bool).at[1, 2:4].set(False).at[2, 5:].set(False)
        ones = gae.ngram_starts(action, size=1)
        np.testing.assert_array_equal(ones, action)
        found, returns = gae.macro_gae(reward, value, action, ones, discount=0.9, gae_lambda=0.8)
        token = gae.gae(reward, value, action, discount=0.9, gae_lambda=0.8)
        np.testing.assert_allclose(found, token, atol=1e-12)
        np.testing.assert_allclose(returns, np.where(action, token + value, 0), atol=1e-12)
        everything = jnp.ones((3, 7), bool)
        one = gae.ngram_starts(everything, size=9)
        found, _ = gae.macro_gae(reward, value, everything, one, discount=0.9, gae_lambda=0.8)
        expected = np.sum(reward, axis=1) - np.mean(value, axis=1)
        np.testing.assert_allclose(found, np.tile(expected[:, None], (1, 7)), atol=1e-12)


def test_gradient_of_a_macro_is_shared_by_its_tokens():
    # The first macro's A: -1/2 to each of its two values, (1 - 0.95) / 2 to each of the next macro's; 1, 1, 0.95, 0.95
    # to rewards. What was not sampled gets none.
    action = jnp.array([[True, True, True, True, False]])
    starts = gae.ngram_starts(action, size=2)
    first = lambda r, v: gae.macro_gae(r, v, action, starts, discount=1.0, gae_lambda=0.95)[0][0, 0]
    pad = lambda x, fill: jnp.pad(x, ((0, 0), (0, 1)), constant_values=fill)
    gradients = jax.grad(first, argnums=(0, 1))(pad(MACRO_REWARDS, 0), pad(MACRO_VALUES, NAN))
    np.testing.assert_allclose(gradients[0][0, :4], [1, 1, 0.95, 0.95], rtol=1e-6)
    np.testing.assert_allclose(gradients[1], [[-0.5, -0.5, 0.025, 0.025, 0]], rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_macros_are_as_long_as_asked_for(size):
    starts = gae.ngram_starts(jnp.ones((1, 7), bool), size=size)
    np.testing.assert_array_equal(np.flatnonzero(starts[0]), np.arange(0, 7, size))


def test_macros_of_random_sizes_by_hand():
    # Sizes 1 and 3 by even and odd noise. The first row: 1, 3, 3, of which the row's end cuts off two. The second: its
    # macro of 3 is cut short by a token of others, and the next begins after it. Noise within a macro is not read.
    noise = jnp.array([[2, 1, 0, 0, 7], [1, 0, 0, 4, 4]], jnp.uint32)
    mask = jnp.array([[True] * 5, [True, True, False, True, True]])
    found = jax.jit(lambda m, n: gae.random_starts(m, n, sizes=(1, 3)))(mask, noise)
    np.testing.assert_array_equal(found, [[True, True, False, False, True], [True, False, False, True, True]])


@pytest.mark.parametrize(
    "starts",
    [
        lambda mask, noise: gae.ngram_starts(mask, size=2),
        lambda mask, noise: gae.random_starts(mask, noise, sizes=(1, 3)),
    ],
)
def test_rows_of_macros_may_be_sharded(starts):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4])
    rng = np.random.default_rng(0)
    rows = rng.random((8, 6)) < 0.8, rng.integers(0, 2**32, (8, 6), dtype=np.uint32)
    alone = jax.jit(starts)(*rows)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, jax.NamedSharding(mesh, jax.P("data"))) for x in rows]
        np.testing.assert_array_equal(jax.jit(starts)(*sharded), alone)


def test_every_size_of_a_macro_is_as_likely():
    noise = np.random.default_rng(0).integers(0, 2**32, (1, 6000), dtype=np.uint32)
    starts = np.flatnonzero(gae.random_starts(jnp.ones(noise.shape, bool), jnp.array(noise), sizes=(1, 2, 5))[0])
    lengths = np.diff(starts)
    assert set(lengths) == {1, 2, 5}
    # 2250 macros of mean size 8 / 3: a share's standard deviation is 0.01
    np.testing.assert_allclose([np.mean(lengths == size) for size in (1, 2, 5)], 1 / 3, atol=0.04)
