"""Bradley-Terry with labels that other reward models doubt, by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pair_objectives import sequences

import jrl
from jrl.algos import ALGOS
from jrl.algos.contract import Facts
from jrl.algos.noisy_bradley_terry import NoisyBradleyTerry
from jrl.config import ConfigError

ROW = ALGOS["NoisyBradleyTerry"]
FACTS = Facts(samples=1, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=8)
CONFIG = NoisyBradleyTerry(flip_below=-0.5, soft_below=0.2, noise=0.1)
# Scores 2 apart in every pair, strengths -0.8, 0.05 and 1.5
PAIRS = dataclasses.replace(
    sequences([0.0] * 6, [0.0] * 6, [3] * 6),
    logprob=None, ref_logprob=None, score=jnp.float32([[1.5, -0.5, 1.0, -1.0, 2.0, 0.0]]),
    value=jnp.float32([[0.1, 0.9, 0.55, 0.5, 1.0, -0.5]]),
)  # fmt: skip
# log(1 + e^2); 0.9 log(1 + e^-2) + 0.1 log(1 + e^2); log(1 + e^(1.5 - 2))
BY_HAND = [2.126928, 0.9 * 0.126928 + 0.1 * 2.126928, 0.474077]


def test_by_hand():
    loss, metrics = jax.jit(ROW.sequence_loss)(CONFIG, PAIRS, ())
    np.testing.assert_allclose(loss, [[BY_HAND[0], 0, BY_HAND[1], 0, BY_HAND[2], 0]], 1e-5)
    np.testing.assert_allclose(metrics["pairs/strength"], [[-0.8, 0, 0.05, 0, 1.5, 0]], 1e-5)
    np.testing.assert_array_equal(metrics["pairs/flipped"], [[1, 0, 0, 0, 0, 0]])
    np.testing.assert_allclose(metrics["reward_model/margin"], [[2, 0, 2, 0, 2, 0]])


def test_masked_pairs_are_not_seen_and_strengths_have_no_gradient():
    mask = jnp.array([[True, True, False, False, True, True]])
    nan = lambda x: jnp.where(mask, x, jnp.nan)
    masked = dataclasses.replace(PAIRS, mask=mask, score=nan(PAIRS.score), value=nan(PAIRS.value))
    total = lambda given: ROW.sequence_loss(
        CONFIG, dataclasses.replace(masked, score=given["score"], value=given["value"]), ()
    )[0].sum()
    value, slope = jax.jit(jax.value_and_grad(total))({"score": masked.score, "value": masked.value})
    np.testing.assert_allclose(value, BY_HAND[0] + BY_HAND[2], 1e-5)
    # sigmoid(2) on the flipped pair, -sigmoid(1.5 - 2) on the clear one
    np.testing.assert_allclose(slope["score"], [[0.880797, -0.880797, 0, 0, -0.377541, 0.377541]], 1e-5)
    np.testing.assert_array_equal(slope["value"], 0)


def test_a_pair_that_lacks_an_answer_is_left_out():
    empty = PAIRS.replace(length=jnp.int32([[3, 0, 3, 3, 0, 3]]))
    loss, metrics = ROW.sequence_loss(CONFIG, empty, ())
    np.testing.assert_allclose(loss, [[0, 0, BY_HAND[1], 0, 0, 0]], 1e-5)
    np.testing.assert_allclose(metrics["pairs/strength"], [[0, 0, 0.05, 0, 0, 0]], 1e-5)
    half = PAIRS.replace(mask=jnp.array([[True, False, True, True, False, True]]))
    np.testing.assert_allclose(ROW.sequence_loss(CONFIG, half, ())[0], [[0, 0, BY_HAND[1], 0, 0, 0]], 1e-5)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"models": ()}, r"models is empty"),
        ({"flip_below": 0.5}, r"flip_below = 0\.5 must not be above soft_below = 0\.0"),
        ({"models": ("reward",)}, r"turns labels around by the word of one model, 'reward'"),
        ({"noise": 0.5}, r"NoisyBradleyTerry\.noise = 0\.5"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, message):
    ROW.check(NoisyBradleyTerry(), FACTS)
    ROW.check(NoisyBradleyTerry(models=("reward",), flip_below=-1e9), FACTS)
    with pytest.raises(ValueError, match=message):
        ROW.check(NoisyBradleyTerry(**fields), FACTS)


def test_its_models_are_roles_of_earlier_stages():
    path = "configs/algos/noisy_preferences.gin"
    jrl.load_config(path)
    with pytest.raises(ConfigError, match=r"NoisyBradleyTerry\.models names the role 'fourth'"):
        jrl.load_config(path, ["NoisyBradleyTerry.models=('first', 'fourth')"])
    with pytest.raises(ConfigError, match=r"names the role 'policy', which has no reward head.*by then: first, second"):
        jrl.load_config(path, ["NoisyBradleyTerry.models=('first', 'policy')"])
