from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.bradley_terry import BradleyTerry
from jrl.algos.contract import Facts, Needs, Sequences, count_units, other_of_pair

OBJECTIVE = ALGOS["BradleyTerry"]
FACTS = Facts(samples=1, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=8)


def pairs(score, label=None, mask=None, unit=None):
    """Returns sequences of one row, the preferred one of each pair first."""
    places = len(score)
    return Sequences(
        logprob=None,
        ref_logprob=None,
        length=jnp.full(places, 3, jnp.int32),
        score=jnp.asarray(score, jnp.float32),
        label=jnp.asarray([1.0, 0.0] * (places // 2) if label is None else label, jnp.float32),
        unit=jnp.asarray(np.arange(places) // 2 if unit is None else unit, jnp.int32),
        mask=jnp.ones(places, bool) if mask is None else jnp.asarray(mask),
    )


@pytest.mark.parametrize(
    "config, expected",
    [
        # d = 1 - 0.5 = 0.5: -log sigmoid(0.5) = log(1 + exp(-0.5)) = log(1.606531) = 0.474077
        (BradleyTerry(), 0.474077),
        # less a margin of 1: -log sigmoid(-0.5) = log(1 + exp(0.5)) = log(2.648721) = 0.974077
        (BradleyTerry(margin=1.0), 0.974077),
        # and 0.01 * (1 + 0.5)^2 = 0.0225 for scores that are not centered: 0.474077 + 0.0225 = 0.496577
        (BradleyTerry(center=0.01), 0.496577),
    ],
)
def test_the_loss_of_a_pair_by_hand(config, expected):
    loss, metrics = jax.jit(OBJECTIVE.sequence_loss)(config, pairs([1.0, 0.5]), ())
    np.testing.assert_allclose(loss, [expected, 0], atol=1e-6)
    np.testing.assert_allclose(metrics["reward_model/margin"], [0.5, 0], rtol=1e-6)
    np.testing.assert_array_equal(metrics["reward_model/accuracy"], [1, 0])


def test_a_pair_in_the_wrong_order_costs_more_and_a_tie_is_half_right():
    # d = -2: log(1 + exp(2)) = log(8.389056) = 2.126928; and a tie: log(2) = 0.693147
    loss, metrics = OBJECTIVE.sequence_loss(BradleyTerry(), pairs([-1.0, 1.0, 0.3, 0.3]), ())
    np.testing.assert_allclose(loss, [2.126928, 0, 0.693147, 0], atol=1e-6)
    np.testing.assert_array_equal(metrics["reward_model/accuracy"], [0, 0, 0.5, 0])


def test_it_is_the_cross_entropy_of_choosing_the_preferred_one():
    """-log sigmoid(a - b) = -log_softmax([a, b])[0]."""
    score = np.random.default_rng(0).normal(size=(5, 2)) * 3
    with jax.enable_x64(True):
        sequences = pairs(score.reshape(-1)).replace(score=jnp.asarray(score.reshape(-1), jnp.float64))
        loss, _ = OBJECTIVE.sequence_loss(BradleyTerry(), sequences, ())
        expected = -jax.nn.log_softmax(jnp.asarray(score, jnp.float64))[:, 0]
        np.testing.assert_allclose(loss.reshape(5, 2)[:, 0], expected, atol=1e-12)


def test_scores_are_pulled_apart_by_the_odds_of_being_wrong():
    # d/dr_w = -sigmoid(-0.5) = -0.377541, d/dr_l the opposite; each with 2 * 0.01 * 1.5 = 0.03 more where centered
    total = lambda score, config: OBJECTIVE.sequence_loss(config, pairs([0, 0]).replace(score=score), ())[0].sum()
    gradient = jax.jit(jax.grad(total))
    np.testing.assert_allclose(gradient(jnp.array([1.0, 0.5]), BradleyTerry()), [-0.377541, 0.377541], atol=1e-6)
    centered = gradient(jnp.array([1.0, 0.5]), BradleyTerry(center=0.01))
    np.testing.assert_allclose(centered, [-0.347541, 0.407541], atol=1e-6)


def test_the_gradient_is_that_of_small_differences():
    with jax.enable_x64(True):
        config = BradleyTerry(margin=0.3, center=0.02)
        total = lambda score: OBJECTIVE.sequence_loss(config, pairs([0] * 4).replace(score=score), ())[0].sum()
        score, step = jnp.array([0.7, -0.4, -1.2, 0.9], jnp.float64), 1e-6
        shifts = jnp.eye(4, dtype=jnp.float64) * step
        numeric = [(total(score + shift) - total(score - shift)) / (2 * step) for shift in shifts]
        np.testing.assert_allclose(jax.grad(total)(score), numeric, atol=1e-9)


def test_masked_pairs_and_empty_places_do_not_count():
    # the pair [1, 0.5] beside a masked pair of NaN and an empty place
    mask = [True, True, False, False, False]
    labels = [1, 0, np.nan, np.nan, np.nan]
    sequences = pairs([1.0, 0.5, np.nan, np.nan, np.nan], labels, mask, unit=[0, 0, 1, 1, -1])
    total = lambda score: OBJECTIVE.sequence_loss(BradleyTerry(), sequences.replace(score=score), ())[0].sum()
    loss, gradient = jax.jit(jax.value_and_grad(total))(sequences.score)
    np.testing.assert_allclose(loss, 0.474077, atol=1e-6)
    np.testing.assert_allclose(gradient, [-0.377541, 0.377541, 0, 0, 0], atol=1e-6)


def test_the_preferred_sequence_may_stand_anywhere():
    # the pairs [1, 0.5] and [2, 0], the second with its preferred sequence last: log(1 + exp(-2)) = 0.126928
    sequences = pairs([0.0, 1.0, 0.5, 2.0], label=[0, 1, 0, 1], unit=[7, 3, 3, 7])
    loss, _ = OBJECTIVE.sequence_loss(BradleyTerry(), sequences, ())
    np.testing.assert_allclose(loss, [0, 0.474077, 0, 0.126928], atol=1e-6)


def test_the_step_is_a_mean_over_pairs():
    mask, unit = jnp.array([True] * 4 + [False] * 2), jnp.array([0, 0, 1, 1, -1, -1], jnp.int32)
    assert OBJECTIVE.sequence_denominator(BradleyTerry(), mask, unit) == 2
    assert OBJECTIVE.unit_size == 2
    needs = OBJECTIVE.needs(BradleyTerry())
    assert needs == Needs(logprobs=False, score=True) and needs.heads == ("reward",)


@pytest.mark.parametrize(
    "config, message",
    [
        (BradleyTerry(margin=-0.1), r"BradleyTerry\.margin = -0\.1"),
        (BradleyTerry(margin=float("nan")), r"BradleyTerry\.margin = nan"),
        (BradleyTerry(center=0.0), r"BradleyTerry\.center = 0\.0 must be above 0, or None"),
    ],
)
def test_illegal_combinations_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)


# What rows of pairs are written with


def test_the_other_of_a_pair_by_hand():
    # units 0: places 0 and 1; 4: places 2 and 4; place 3 is alone, place 5 is empty
    sequences = pairs([0] * 6, unit=[0, 0, 4, 2, 4, -1], mask=[True] * 5 + [False])
    x = jnp.array([1.0, 2.0, 3.0, 4.0, 5.0, jnp.nan])
    np.testing.assert_array_equal(jax.jit(other_of_pair)(x, sequences), [2, 1, 5, 0, 3, 0])


def test_the_other_of_a_pair_is_looked_for_in_its_own_row():
    sequences = jax.tree.map(lambda x: jnp.stack([x, x]), pairs([0] * 2))
    x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(other_of_pair(x, sequences), [[2, 1], [4, 3]])


def test_the_gradient_of_the_other_goes_to_the_other():
    sequences = pairs([0] * 4, mask=[True, True, False, False])
    pull = jax.grad(lambda x: (other_of_pair(x, sequences) * jnp.array([10.0, 1.0, 5.0, 5.0])).sum())
    np.testing.assert_array_equal(pull(jnp.array([1.0, 2.0, jnp.nan, jnp.nan])), [1, 10, 0, 0])


@pytest.mark.parametrize(
    "mask, unit, expected",
    [
        ([1, 1, 1, 1], [0, 0, 1, 1], 2),
        ([1, 1, 1, 1], [0, 1, 2, 3], 4),
        ([1, 1, 0, 0], [0, 0, 1, 1], 1),
        ([0, 0, 1, 1], [0, 0, 5, 5], 1),
        ([1, 1, 1, 0], [0, 0, 0, -1], 1),
        ([0, 0, 0, 0], [0, 0, 1, 1], 1),  # at least 1, so that nothing is 0 / 0
        ([0, 0, 0, 0], [-1, -1, -1, -1], 1),
    ],
)
def test_units_are_counted_once(mask, unit, expected):
    count = jax.jit(count_units)(jnp.array(mask, bool), jnp.array(unit, jnp.int32))
    assert count == expected and count.dtype == jnp.float32


@pytest.mark.parametrize("length", [[0, 3, 1, 1], [3, 0, 1, 1]])
def test_a_pair_with_an_empty_answer_is_left_out(length):
    both = pairs([1.0, 0.5, 1.0, 0.5]).replace(length=jnp.int32(length))
    loss, metrics = OBJECTIVE.sequence_loss(BradleyTerry(center=0.01), both, ())
    np.testing.assert_allclose(loss, [0, 0, 0.474077 + 0.01 * 1.5**2, 0], 1e-6)
    np.testing.assert_array_equal(metrics["reward_model/accuracy"], [0, 0, 1, 0])
