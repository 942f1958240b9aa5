"""Token regularization (P25), IFT's weights and ILF's choice (P34), and latent users (P36), by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops.latent_user import draw_latent, latent_kl, latent_preference, win_scaled
from jrl.ops.supervised import closest_refinement, propagated_weights
from jrl.ops.token_regularization import contrastive_token_reward, token_regularized, token_regularizer

NAN = jnp.nan
TOKENS = jnp.array([True, True, False])


def test_contrastive_token_reward_by_hand():
    reward = jax.jit(contrastive_token_reward)
    better, worse = jnp.array([-1.0, -2.0, NAN]), jnp.array([-1.4, -1.5, NAN])
    # sigmoid(0.4) - 0.5, sigmoid(-0.5) - 0.5
    np.testing.assert_allclose(reward(better, worse, TOKENS), [0.098688, -0.122459, 0], rtol=1e-5)
    pull = jax.grad(lambda lp: contrastive_token_reward(lp, worse, TOKENS).sum())
    np.testing.assert_array_equal(pull(better), 0)
    with jax.enable_x64(True):  # float32 rounds what the clamp at 20 leaves, sigmoid(-20) = 2.06115e-9
        far = contrastive_token_reward(jnp.zeros(1), jnp.full(1, 99.0), jnp.ones(1, bool))
        np.testing.assert_allclose(0.5 - jnp.abs(far), 2.06115e-9, rtol=1e-5)


def test_token_regularizer_by_hand():
    reward, logprobs = jnp.array([0.2, -0.1, NAN]), jnp.array([-1.0, -1.0, NAN])
    of = lambda lp: token_regularizer(lp, reward, TOKENS, beta=0.1)
    np.testing.assert_allclose(jax.jit(of)(logprobs), 0.01, rtol=1e-5)  # -0.1 (0.2 * -1 - 0.1 * -1)
    np.testing.assert_allclose(jax.grad(of)(logprobs), [-0.02, 0.01, 0], rtol=1e-5)
    of_reward = jax.grad(lambda r: token_regularizer(logprobs, r, TOKENS, beta=0.1))(reward)
    np.testing.assert_array_equal(of_reward, 0)


def test_token_regularized_by_hand():
    of = lambda m, w, l: token_regularized(m, w, l, alpha=0.25)
    loss = jax.jit(of)(jnp.float32(0.2), jnp.float32(0.01), jnp.float32(0.02))
    np.testing.assert_allclose(loss, 0.60152, atol=1e-5)  # 0.598139 + 0.25 * sigmoid(-0.2) * 0.03
    slopes = jax.grad(of, argnums=(0, 1, 2))(0.2, 0.01, 0.02)
    # -sigmoid(-0.2): the weight has no gradient; 0.25 * sigmoid(-0.2) of both answers
    np.testing.assert_allclose(slopes, [-0.450166, 0.112541, 0.112541], rtol=1e-5)
    np.testing.assert_allclose(token_regularized(0.2, 9.0, 9.0, alpha=0.0), 0.598139, rtol=1e-5)


def test_propagated_weights_by_hand():
    lp = jnp.array([[-1.0, -2.0, NAN], [NAN, -1.0, -2.0], [0.0, 0.0, 0.0], [-3.0, NAN, NAN]])
    mask = jnp.array([[True, True, False], [False, True, True], [True, True, False], [True, False, False]])
    alone = dict(num_segments=1, discount=0.95)
    of = lambda lp: propagated_weights(lp, mask, jnp.zeros_like(mask, jnp.int32), **alone)
    # 2 (0.5 + 0.95) / 2.45 and 2 * 1 / 2.45, wherever the row begins; 1 where nothing is left to learn
    expected = [[1.183673, 0.816327, 0], [0, 1.183673, 0.816327], [1, 1, 0], [1, 0, 0]]
    np.testing.assert_allclose(jax.jit(of)(lp), expected, rtol=1e-5)
    np.testing.assert_array_equal(jax.grad(lambda lp: of(lp).sum())(lp), 0)
    counted = lambda lp: (of(lp) * jnp.array([[1.0, 2.0, 3.0]])).sum()
    np.testing.assert_array_equal(jax.grad(counted)(lp), 0)  # the weights are held, and not their sum alone
    np.testing.assert_allclose(of(lp / 10), expected, rtol=1e-5)  # shares of the loss, however small
    gap = propagated_weights(
        jnp.array([-1.0, NAN, -2.0]), jnp.array([True, False, True]), jnp.zeros(3, jnp.int32), **alone
    )
    np.testing.assert_allclose(gap, [1.183673, 0, 0.816327], rtol=1e-5)  # a masked token is no step


def test_weights_of_one_sequence_do_not_see_the_others_of_its_row():
    lp, mask = jnp.array([-1.0, -2.0, -3.0, 0.0, -7.0, NAN]), jnp.array([True] * 5 + [False])
    segment = jnp.array([0, 0, 1, 1, 2, 3])
    found = propagated_weights(lp, mask, segment, num_segments=3, discount=0.95)
    np.testing.assert_allclose(found, [1.183673, 0.816327, 2, 0, 1, 0], rtol=1e-5)  # 3 and 0: a mean of 1.5


def test_the_refinement_most_like_the_feedback_is_taken():
    feedback = jnp.array([[1.0, 0.0]] * 4)
    refinements = jnp.array(
        [[[9.0, 9.0], [2.0, 0.1]], [[2.0, 0.1], [NAN, NAN]], [[1.0, 0.0], [3.0, 0.0]], [[NAN] * 2] * 2]
    )
    valid = jnp.array([[True, True], [True, False], [True, True], [False, False]])
    np.testing.assert_array_equal(jax.jit(closest_refinement)(feedback, refinements, valid), [1, 0, 0, -1])


def test_refinements_are_compared_by_direction_and_by_what_is_valid():
    # (0.1, 0) points where the feedback does, (0.5, 0.5) does not; one that points away is better than none
    feedback, small = jnp.array([1.0, 0.0]), jnp.array([[0.1, 0.0], [0.5, 0.5]])
    assert closest_refinement(feedback, small, jnp.array([True, True])) == 0
    assert closest_refinement(feedback, -small, jnp.array([False, True])) == 1
    # The feedback's ratio is 1.0078, and 1.0056 of its unit in bfloat16; both are as near at 1.0067.
    near, both = jnp.array([1, 1 + 2.0**-7], jnp.bfloat16), jnp.array([[1.0, 0.0], [-0.006678, 0.999978]])
    assert closest_refinement(near, both, jnp.array([True, True])) == 1


def test_latent_kl_by_hand():
    # (1 + 1 - 1 - log 1) / 2 = 0.5; with sigma = 2, mu = 0: (4 - 1 - log 4) / 2 = 0.806853
    kl = jax.jit(latent_kl)(jnp.array([[1.0], [0.0], [0.0]]), jnp.log(jnp.array([[1.0], [2.0], [1.0]])))
    np.testing.assert_allclose(kl, [0.5, 0.806853, 0], atol=1e-6)
    slope = jax.grad(lambda m, s: latent_kl(m, s), argnums=(0, 1))(jnp.array([1.0]), jnp.array([0.0]))
    np.testing.assert_allclose(jnp.concatenate(slope), [1.0, 0.0], atol=1e-6)  # mu, sigma^2 - 1


def test_the_kl_of_several_numbers_is_their_sum_in_float32():
    kl = latent_kl(jnp.array([[1.0, 0.0]]), jnp.log(jnp.array([[1.0, 2.0]])))
    np.testing.assert_allclose(kl, [1.306853], atol=1e-6)
    near = 1 + 2.0**-7  # bfloat16 has it, and not its square
    small, zero = lambda x: jnp.array([x], jnp.bfloat16), jnp.zeros(1)
    np.testing.assert_allclose(latent_kl(small(near), zero), near**2 / 2, 1e-6)
    np.testing.assert_allclose(latent_kl(zero, small(near)), (np.exp(2 * near) - 1 - 2 * near) / 2, 1e-6)
    pair = jnp.array([1.0, near], jnp.bfloat16)
    found = latent_preference(pair[0], pair[1], jnp.float32(0), weight=1.0)
    np.testing.assert_allclose(found, np.log1p(np.exp(2.0**-7)), 1e-6)


def test_a_user_without_comparisons_has_the_mean_of_the_prior():
    mean, log_std = jnp.array([[1.0, 2.0], [NAN, NAN]]), jnp.array([[0.0, NAN], [NAN, NAN]]).at[0, 1].set(np.log(3.0))
    known = jnp.array([True, False])
    draw = lambda mean: draw_latent(mean, log_std, jnp.array([[0.5, -1.0], [9.0, 9.0]]), known)
    np.testing.assert_allclose(jax.jit(draw)(mean), [[1.5, -1.0], [0, 0]], rtol=1e-6)
    noise = jnp.array([[0.5, -1.0], [9.0, 9.0]])
    slope = jax.grad(lambda s: draw_latent(mean, s, noise, known).sum())(log_std)
    np.testing.assert_allclose(slope, [[0.5, -3.0], [0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(lambda m: draw(m).sum())(mean), [[1, 1], [0, 0]])


def test_latent_preference_by_hand():
    # -log sigmoid(1 - 0.5) + 0.01 * 0.5
    of = lambda r: latent_preference(r[0], r[1], r[2], weight=0.01)
    scores = jnp.array([1.0, 0.5, 0.5])
    np.testing.assert_allclose(jax.jit(of)(scores), 0.479077, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(of)(scores), [-0.377541, 0.377541, 0.01], rtol=1e-5)


def test_win_scaled_by_hand():
    score, mask = jnp.array([1.0, 0.0, NAN]), jnp.array([True, True, False])
    # (1/2 + sigmoid(1)) / 2 and (1/2 + sigmoid(-1)) / 2: shifts of a user's rewards do not matter
    np.testing.assert_allclose(jax.jit(win_scaled)(score, mask), [0.615529, 0.384471, 0], rtol=1e-5)
    np.testing.assert_allclose(win_scaled(score + 7, mask), win_scaled(score, mask), rtol=1e-6)
    # of two users, one with a single answer
    found = win_scaled(jnp.stack([score, score]), jnp.array([[True, True, False], [False, True, False]]))
    np.testing.assert_allclose(found, [[0.615529, 0.384471, 0], [0, 0.5, 0]], rtol=1e-5)
