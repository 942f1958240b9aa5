"""Losses of a pair by hand. The running example: u_w = 1, u_l = -1, so that D = 2; beta = 0.1."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import pair_losses
from jrl.ops.listwise import pro, rrhf
from jrl.ops.soft_q import conservative_q, expectile, inverse_soft_q, q_error

BETA, W, L = 0.1, 1.0, -1.0

# (function, arguments, value by hand)
BY_HAND = {
    # log(1 + e^-0.2) = 0.598139, log(1 + e^0.2) = 0.798139
    "soft": (pair_losses.soft_preference, (0.2, 0.9), 0.9 * 0.598139 + 0.1 * 0.798139),
    "certain": (pair_losses.soft_preference, (0.2, 1.0), 0.598139),
    "strength": (pair_losses.soft_preference, (0.2, 0.8), 0.638139),
    "robust": (pair_losses.robust, (0.2, 0.1), (0.9 * 0.598139 - 0.1 * 0.798139) / 0.8),
    "ipo": (pair_losses.ipo, (2.0, 0.1), 9.0),  # (2 - 5)^2
    "ipo, mean": (pair_losses.ipo, (1 / 10 + 1 / 12, 0.1), 23.20028),  # (0.183333 - 5)^2
    "hinge": (pair_losses.hinge, (0.2,), 0.8),
    "hinge, won": (pair_losses.hinge, (1.5,), 0.0),
    "log odds": (pair_losses.log_odds, (-0.5,), -0.5 - np.log(1 - np.exp(-0.5))),  # 0.432752
    "log odds, far": (pair_losses.log_odds, (-1.0,), -1 - np.log(1 - np.exp(-1.0))),  # -0.541325
    "simpo": (pair_losses.simpo, (-0.5, -1.0, 2.0, 1.0), np.log(2)),  # -log sigmoid(2 * 0.5 - 1)
    "simpo, no gamma": (pair_losses.simpo, (-0.5, -1.0, 2.0, 0.0), 0.313262),  # log(1 + e^-1)
    # (e^-0.5 - 1) / -0.5 - (e^0.5 - 1) / -0.5 = 2.08438
    "alpha": (lambda u, v: pair_losses.alpha_link(u, 0.5) - pair_losses.alpha_link(v, 0.5), (W, L), 2.08438),
    "forward": (lambda u, v: pair_losses.alpha_link(u, 0.0) - pair_losses.alpha_link(v, 0.0), (W, L), 2.35040),
    "reverse": (lambda u, v: pair_losses.alpha_link(u, 1.0) - pair_losses.alpha_link(v, 1.0), (W, L), 2.0),
    "js": (lambda u, v: pair_losses.jensen_shannon_link(u) - pair_losses.jensen_shannon_link(v), (W, L), 1.0),
    "exo": (pair_losses.exo, (0.2, 1e-3), 2.42201),
    "nca": (pair_losses.nca, (W, L, BETA), 1.33879),
    "nca, both up": (pair_losses.nca, (W, 1.0, BETA), 0.644397 + 0.744397),
    "sppo": (pair_losses.sppo, (W, L, BETA), 32.0),  # (1 - 5)^2 + (-1 + 5)^2
    "sppo, apart": (pair_losses.sppo, (2.0, 3.0, BETA), 73.0),  # (2 - 5)^2 + (3 + 5)^2
    "apo zero": (pair_losses.apo_zero, (W, L, BETA), 0.95004),
    "apo down": (pair_losses.apo_down, (W, L, BETA), 0.97515),
    "bco": (pair_losses.bco, (W, L, BETA, 0.0), 1.28879),  # 2 log(1 + e^-0.1)
    "bco, shifted": (pair_losses.bco, (W, L, BETA, 0.3), 0.798139 + 0.513015),  # log(1 + e^0.2), log(1 + e^-0.4)
    "wpo": (pair_losses.pair_weight, (-0.5, -1.0), 0.22313),  # e^-1.5
    "wpo, likely": (pair_losses.pair_weight, (0.5, -0.25), 1.0),
    "step apo": (pair_losses.step_apo, (0.2, 0.8, 0.2, 0.5), 0.74440),  # log(1 + e^(0.3 - 0.2))
    "inpo": (pair_losses.inpo, (2.0, 0.0, 1.0, 0.5, 0.1), 0.04),  # (2 - 0.2 * 0 - 0.8 * 1 - 1)^2
    "inpo, ref": (pair_losses.inpo, (2.0, 3.0, 1.0, 0.5, 0.1), 0.16),  # (2 - 0.6 - 0.8 - 1)^2
    "inpo, before": (pair_losses.inpo, (2.0, 3.0, 2.0, 0.5, 0.1), 1.44),  # (2 - 0.6 - 1.6 - 1)^2
    "cpl": (pair_losses.cpl, (-10.0, -12.0, 0.1, 0.5), 0.91302),  # log(1 + e^(-0.6 + 1))
    "noisy, clear": (pair_losses.noisy_preference, (2.0, 1.5, 0.0, 0.1, 0.1), 0.47408),  # log(1 + e^(1.5 - 2))
    # soft: 0.9 log(1 + e^-2) + 0.1 log(1 + e^2)
    "noisy, soft": (pair_losses.noisy_preference, (2.0, 0.05, 0.0, 0.1, 0.1), 0.9 * 0.126928 + 0.1 * 2.126928),
    "noisy, flipped": (pair_losses.noisy_preference, (2.0, -0.8, 0.0, 0.1, 0.1), 2.126928),
    "expectile": (expectile, (1.0, 0.7), 0.7),
    "expectile, near": (expectile, (0.5, 0.7), 0.175),  # 0.7 * 0.5^2
    "expectile, below": (expectile, (-2.0, 0.7), 1.2),  # 0.3 * 4
    "q": (q_error, (0.5, 1.0, 0.4, 0.5), 0.49),  # (1 + 0.2 - 0.5)^2
    # Q = [2, 0]: V = log(e^2 + 1) = 2.126928, log pi = -0.126928; V' = log(2 e) = 1.693147
    "inverse q": (inverse_soft_q, (-0.126928, 2.126928, 1.693147, 1.0, 0.5), 0.17401),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    function, arguments, value = BY_HAND[name]
    found = jax.jit(function)(*(jnp.float32(x) for x in arguments))
    np.testing.assert_allclose(found, value, 2e-5, 1e-6)
    assert found.dtype == jnp.float32


def test_a_flipped_share_of_labels_leaves_the_robust_loss_that_of_the_true_ones_on_average():
    margin, noise = jnp.float32(0.7), 0.2
    mean = (1 - noise) * pair_losses.robust(margin, noise) + noise * pair_losses.robust(-margin, noise)
    np.testing.assert_allclose(mean, jax.nn.softplus(-margin), 1e-6)


def test_alpha_links_are_continuous_at_the_reverse_kl():
    u = jnp.linspace(-3, 3, 7)
    np.testing.assert_allclose(pair_losses.alpha_link(u, 1 - 1e-3), pair_losses.alpha_link(u, 1.0), 5e-3, 1e-6)
    assert jnp.isfinite(jax.grad(lambda a: pair_losses.alpha_link(u, a).sum())(1.0))


def test_links_hold_a_log_ratio_to_twenty():
    for link in (lambda u: pair_losses.alpha_link(u, 0.0), pair_losses.jensen_shannon_link):
        np.testing.assert_array_equal(link(jnp.float32([-90, 90])), link(jnp.float32([-20, 20])))


def test_log_odds_keep_their_digits_at_both_ends():
    # LPbar -> 0: the clamp at -1e-6, log odds = -1e-6 - log(1e-6) = 13.81551
    np.testing.assert_allclose(pair_losses.log_odds(jnp.float32([0.0, -1e-9])), [13.81551] * 2, 1e-6)
    np.testing.assert_allclose(pair_losses.log_odds(jnp.float32(-80.0)), -80.0, 1e-6)
    assert np.isfinite(jax.vmap(jax.grad(pair_losses.log_odds))(jnp.float32([0.0, -1e-3, -80.0]))).all()


def test_weights_and_shifts_carry_no_gradient():
    for function, arguments in (
        (pair_losses.pair_weight, (-0.5, -1.0)),
        (lambda x: pair_losses.bco(1.0, -1.0, 0.1, x), (0.2,)),
        (lambda x: pair_losses.noisy_preference(2.0, x, 0.0, 0.1, 0.1), (1.5,)),
        (lambda x: q_error(0.5, 1.0, x, 0.9), (0.4,)),
    ):
        gradient = jax.grad(function, argnums=tuple(range(len(arguments))))(*map(jnp.float32, arguments))
        assert not any(gradient)


def test_the_gradient_of_a_pair_pulls_it_apart():
    # d/dD of -log sigmoid(b D) = -b sigmoid(-b D) = -0.1 * 0.450166; of the hinge -b; of IPO 2 (D - 5) = -6
    d = jnp.float32(2.0)
    np.testing.assert_allclose(jax.grad(lambda d: pair_losses.soft_preference(0.1 * d, 1.0))(d), -0.0450166, 1e-5)
    np.testing.assert_allclose(jax.grad(lambda d: pair_losses.hinge(0.1 * d))(d), -0.1, 1e-6)
    np.testing.assert_allclose(jax.grad(lambda d: pair_losses.ipo(d, 0.1))(d), -6.0, 1e-6)
    # of APO-down by u_w: b (sigmoid'(0.1) - sigmoid'(0.2)) = 0.1 (0.249376 - 0.247517): the preferred falls, a little
    np.testing.assert_allclose(jax.grad(lambda u: pair_losses.apo_down(u, -1.0, 0.1))(1.0), 0.000185940, 1e-3)


def test_pro_by_hand_whatever_the_order_and_what_is_masked():
    s, r = [-0.5, -1.0, -2.0, np.nan], [4.0, 3.0, 1.0, np.nan]
    mask = [True, True, True, False]
    # k = 1: T = max(1, 3) = 3; lse(-1.5, -1 * 1, -2 * 3) + 1.5 = 0.97826.  k = 2: T = 2; lse(-2, -4) + 2 = 0.12693
    for order in ([0, 1, 2, 3], [3, 2, 0, 1]):
        pick = lambda x, order=order: jnp.asarray([x[i] for i in order])
        found = jax.jit(pro)(pick(s), pick(r), pick(mask))
        np.testing.assert_allclose(found, 0.97826 + 0.12693, 1e-5)
        np.testing.assert_array_equal(jax.jit(pro)(pick(s)[None], pick(r)[None], pick(mask)[None]), found[None])
        gradient = jax.grad(pro)(pick(s), pick(r), pick(mask))
        assert np.isfinite(gradient).all() and gradient[order.index(3)] == 0 and gradient[order.index(0)] < 0
    assert pro(jnp.float32([-1, -2]), jnp.float32([1, 1]), jnp.ones(2, bool)) == 0  # equal rewards compare nothing


def test_pro_of_rewards_that_differ_by_little():
    # T = 0.25: lse(-0.5 / 4, -1 / 4) + 0.5 / 4
    found = jax.jit(pro)(jnp.float32([-0.5, -1.0]), jnp.float32([0.5, 0.25]), jnp.ones(2, bool))
    np.testing.assert_allclose(found, np.log1p(np.exp(-0.125)), 1e-5)


def test_rrhf_by_hand():
    # the worse answer is likelier by 0.5; the better one over the third is in order
    s, r = jnp.float32([-1.0, -0.5, -3.0, jnp.nan]), jnp.float32([1.0, 0.0, 0.0, jnp.nan])
    mask = jnp.array([True, True, True, False])
    np.testing.assert_allclose(jax.jit(rrhf)(s, r, mask), 0.5, 1e-6)
    np.testing.assert_allclose(rrhf(s[None], r[None], mask[None]), [0.5], 1e-6)
    np.testing.assert_allclose(jax.grad(rrhf)(s, r, mask), [-1, 1, 0, 0])


def test_conservative_q_is_the_surprise_of_the_action():
    # log(e^2 + e^0) - 2 = 0.126928
    np.testing.assert_allclose(conservative_q(jnp.float32([[2.0, 0.0]]), jnp.array([0])), [0.126928], 1e-5)
    np.testing.assert_allclose(conservative_q(jnp.float32([2.0, 0.0]), jnp.array(0)), 0.126928, 1e-5)


def test_values_and_ranks_are_computed_wide():
    narrow = lambda *x: [jnp.asarray(y, jnp.bfloat16) for y in x]
    mask = jnp.ones(3, bool)
    found = [
        expectile(*narrow(1.0), 0.7),
        q_error(*narrow(0.5, 1.0, 0.4), 0.5),
        conservative_q(jnp.ones((1, 3), jnp.bfloat16), jnp.array([0])),
        inverse_soft_q(*narrow(-0.1, 2.1, 1.7), 1.0, 0.5),
        pro(*narrow([-1, -2, -3], [3, 2, 1]), mask),
        rrhf(*narrow([-1, -2, -3], [1, 2, 3]), mask),
    ]
    assert {value.dtype for value in found} == {jnp.dtype(jnp.float32)}
