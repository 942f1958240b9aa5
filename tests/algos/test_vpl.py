"""VPL (P36) by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pair_objectives import FACTS, sequences

from jrl.algos import ALGOS
from jrl.algos.vpl import VPL
from jrl.config import ConfigError
from jrl.experiment import attribute_weights_of
from jrl.ops.latent_user import expected_latent_preference
from jrl.resolve import load_config

ROW = ALGOS["VPL"]
CONFIG = VPL(latent=1, kl_weight=0.1)
# b, e, f, g at the last token of three pairs, the preferred answer first; the third user's pair is alone.
SCORE = [
    [1.0, 2.0, 1.5, 0.0], [0.0, 1.0, 0.5, 0.0],  # differences 1, 1, 1; g 0
    [0.5, 0.0, 0.0, -50.0], [0.0, -1.0, 2.0, -50.0],  # 0.5, 1, -2; g -50
    [2.0, 9.0, 9.0, 9.0], [0.5, 0.0, 0.0, 0.0],  # 1.5
]  # fmt: skip


def users(score=SCORE, label=(1, 0, 3, 2, 1, 0), unit=(0, 0, 0, 0, 1, 1), **fields):
    given = sequences([0.0] * 6, [0.0] * 6, [3] * 6, label)
    given = given.replace(logprob=None, ref_logprob=None, score=jnp.float32([score]), unit=jnp.int32([unit]))
    return given.replace(**fields)


def mean_of_softplus(mean, deviation):
    """E[log(1 + e^-d)], d ~ N(mean, deviation^2), by the trapezoidal rule."""
    x = np.linspace(-10, 10, 20001)
    density = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    return np.trapezoid(np.log1p(np.exp(-(mean + deviation * x))) * density, x)


def test_the_expected_loss_is_the_integral():
    mean, variance = jnp.array([1.0, -2.0, 0.5, 3.0]), jnp.array([0.0, 1.0, 4.0, 0.25])
    found = jax.jit(lambda m, v: expected_latent_preference(m, v, jnp.full(4, 2.0), weight=0.1))(mean, variance)
    expected = [0.2 + mean_of_softplus(m, np.sqrt(v)) for m, v in zip(mean, variance)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    two = expected_latent_preference(mean.reshape(2, 2), variance.reshape(2, 2), jnp.full((2, 2), 2.0), weight=0.1)
    np.testing.assert_allclose(two, found.reshape(2, 2), rtol=1e-6)
    near = 1 + 2.0**-7  # in bfloat16: computed in float32
    low = lambda m, v: expected_latent_preference(m, v, jnp.float32(0), weight=0.0)
    np.testing.assert_allclose(low(jnp.bfloat16(near), jnp.float32(0)), np.log1p(np.exp(-near)), 1e-6)
    np.testing.assert_allclose(low(jnp.float32(1), jnp.bfloat16(near)), mean_of_softplus(1.0, np.sqrt(near)), 1e-6)
    slope = jax.grad(lambda v: expected_latent_preference(mean, v, mean, weight=0.0).sum())(variance)
    assert np.isfinite(slope).all() and slope[1] > 0  # the loss is convex: what is unknown costs


def test_by_hand():
    loss, metrics = jax.jit(ROW.sequence_loss)(CONFIG, users(), ())
    # Pair 0 sees mu = -2, sigma = e^-50 of the other: 1 + 1 * -2 = -1. Pair 1 sees mu = 1, sigma = 1: 0.5 + 1 * 1, with
    # variance 1. The third has z = 0: 1.5. A user's pairs count half each.
    kl = [0.5 * (4 - 1 + 100), 0.5]
    expected = [
        0.5 * (np.log1p(np.e) + 0.1 * kl[0]),
        0.5 * (mean_of_softplus(1.5, 1.0) + 0.1 * kl[1]),
        np.log1p(np.exp(-1.5)),
    ]
    np.testing.assert_allclose(loss, [[expected[0], 0, expected[1], 0, expected[2], 0]], rtol=1e-5)
    np.testing.assert_allclose(metrics["reward_model/accuracy"], [[0, 0, 0.5, 0, 1, 0]])
    np.testing.assert_allclose(metrics["reward_model/margin"], [[-0.5, 0, 0.75, 0, 1.5, 0]], rtol=1e-5)
    np.testing.assert_allclose(metrics["vpl/kl"], [[kl[0] / 2, 0, kl[1] / 2, 0, 0, 0]], rtol=1e-5)
    assert ROW.sequence_denominator(CONFIG, jnp.ones(6, bool), jnp.array([0, 0, 0, 0, 1, 1])) == 2  # users


def test_numbers_of_a_user_add_up():
    # D = 2: b, e1, e2, f1, f2, g1, g2. Pair 0 sees of pair 1 mu = (1, -1) and sigma = (1, e^-1), and is scored
    # 0.5 + 2 * 1 + 1 * -1 = 1.5, with variance 4 * 1 + 1 * e^-2; pair 1 sees mu = (0, 2), sigma = 1 and has e = 0: 1.
    score = [
        [0.5, 2.0, 1.0, 0.0, 2.0, 0.0, 0.0], [0.0] * 7,
        [1.0, 0.0, 0.0, 1.0, -1.0, 0.0, -1.0], [0.0] * 6 + [-1.0],
    ]  # fmt: skip
    given = sequences([0.0] * 4, [0.0] * 4, [3] * 4, (1, 0, 3, 2)).replace(
        logprob=None, ref_logprob=None, score=jnp.float32([score]), unit=jnp.zeros((1, 4), jnp.int32)
    )
    loss, metrics = jax.jit(ROW.sequence_loss)(VPL(latent=2, kl_weight=0.1), given, ())
    np.testing.assert_allclose(metrics["reward_model/margin"], [[0.75, 0, 0.5, 0]], rtol=1e-5)
    # (1 + 1 - 1 - 0) / 2 + (1 + e^-2 - 1 + 2) / 2; (0 + 0) + 4 / 2
    kl = [0.5 + (np.exp(-2) + 2) / 2, 2.0]
    np.testing.assert_allclose(metrics["vpl/kl"], [[kl[0] / 2, 0, kl[1] / 2, 0]], rtol=1e-5)
    expected = [mean_of_softplus(1.5, np.sqrt(4 + np.exp(-2))) + 0.1 * kl[0], np.log1p(np.exp(-1.0)) + 0.1 * kl[1]]
    np.testing.assert_allclose(loss, [[expected[0] / 2, 0, expected[1] / 2, 0]], rtol=1e-4)


def test_what_is_known_of_a_user_is_the_mean_over_the_other_pairs():
    # f = 1, 2 and 6 of three pairs with b = 0, e = 1: mu = 4, 3.5 and 1.5; g = 0, so that sigma = 1
    score = [row for f in (1.0, 2.0, 6.0) for row in ([0.0, 1.0, f, 0.0], [0.0] * 4)]
    _, metrics = ROW.sequence_loss(CONFIG, users(score, (1, 0, 3, 2, 5, 4), (0,) * 6), ())
    np.testing.assert_allclose(metrics["reward_model/margin"], [[4 / 3, 0, 3.5 / 3, 0, 0.5, 0]], rtol=1e-5)


def test_without_a_latent_variable_it_is_bradley_terry():
    flat = [[row[0], 0.0, 0.0, 0.0] for row in SCORE]
    loss, _ = ROW.sequence_loss(CONFIG, users(flat), ())
    pairs = users([row[0] for row in SCORE], (1, 0) * 3, (0, 0, 1, 1, 2, 2))
    plain, _ = ALGOS["BradleyTerry"].sequence_loss(ALGOS["BradleyTerry"].config(), pairs, ())
    np.testing.assert_allclose(loss * jnp.array([[2.0, 1, 2, 1, 1, 1]]), plain, rtol=1e-5)


def test_a_pairs_own_answers_do_not_tell_its_user():
    base, _ = ROW.sequence_loss(CONFIG, users(), ())
    changed = [[*row[:2], row[2] + 3.0 * (place == 0), row[3]] for place, row in enumerate(SCORE)]
    loss, _ = ROW.sequence_loss(CONFIG, users(changed), ())
    assert loss[0, 0] == base[0, 0] and loss[0, 2] != base[0, 2] and loss[0, 4] == base[0, 4]


def test_nothing_under_the_mask_and_no_filler_gets_through():
    expected, _ = ROW.sequence_loss(CONFIG, users(), ())
    alone = np.log1p(np.exp(-1.0))  # pair 0 without the other: z = 0
    nan = jnp.array([False, False, True, True, False, False])[None, :, None]
    poisoned = jnp.where(nan, jnp.nan, users().score)
    masked = users(score=poisoned[0], mask=~nan[..., 0])
    filler = users(label=(1, 0, -1, -1, 1, 0))
    empty = users(length=jnp.int32([[3, 3, 3, 0, 3, 3]]))
    for given in (masked, filler, empty):
        loss, _ = ROW.sequence_loss(CONFIG, given, ())
        np.testing.assert_allclose(loss, [[alone, 0, 0, 0, expected[0, 4], 0]], rtol=1e-5)
    slope = jax.grad(lambda s: ROW.sequence_loss(CONFIG, masked.replace(score=s), ())[0].sum())(masked.score)
    np.testing.assert_array_equal(slope[0, 2:4], 0)
    np.testing.assert_allclose(slope[0, 0], [-1 / (1 + np.e), 0, 0, 0], atol=1e-6)


@pytest.mark.parametrize("fields, message", [({"kl_weight": 0.0}, r"VPL\.kl_weight"), ({"latent": 0}, r"VPL\.latent")])
def test_what_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ROW.check(VPL(**fields), FACTS)


def test_a_score_is_the_reward_of_an_unknown_user_or_of_one_whose_z_is_set():
    # z = 0: r(x, y, 0) = b + e . 0 = b, the first of 1 + 3 * 2 outputs. The mean of all outputs would be no reward.
    config, parts = load_config("configs/algos/vpl.gin")
    assert attribute_weights_of(config.stages, "reward", parts.tables, 2) == (1, 0, 0, 0, 0, 0, 0)
    reads = ["Config.stages=[@warm/Offline(), @pairs/Offline(), @Online()]", "Online.rewards={'reward': 1.0}"]
    with pytest.raises(ConfigError, match=r"not all scores; set Online.attribute_weights, such as \(1.0, 0.0, 0.0, 0"):
        load_config("configs/algos/vpl.gin", reads)
    with pytest.raises(ConfigError, match=r"has 7 outputs; give one weight for each, such as \(1.0, 0.0"):  # not None
        load_config("configs/algos/vpl.gin", [*reads, "Online.attribute_weights=(1, 0)"])
    config, parts = load_config("configs/algos/vpl.gin", [*reads, "Online.attribute_weights=(1, 0.5, -2, 0, 0, 0, 0)"])
    assert attribute_weights_of(config.stages, "reward", parts.tables, 2) == (1, 0.5, -2, 0, 0, 0, 0)
    steps = ["Config.stages=[@warm/Offline(), @pairs/Offline(), @Online()]", "Online.process=@ProcessRewards()"]
    with pytest.raises(ConfigError, match=r"ProcessRewards.role names 'reward', and the outputs .* are not all scores"):
        load_config("configs/algos/vpl.gin", [*steps, "ProcessRewards.role='reward'"])
