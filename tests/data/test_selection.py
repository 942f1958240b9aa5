from __future__ import annotations

import itertools

import numpy as np
import pytest

from jrl.tasks.data import selection
from jrl.tasks.data.levels import LevelRule, next_level
from jrl.tasks.data.mixing import draw_task, progress_shares, size_shares

NAN = float("nan")
EVERY = np.ones(4, bool)


def test_prompts_within_the_band_and_new_ones_are_kept():
    # successes [0, 1, 5, 8] of 8: rates 0, 0.125, 0.625, 1 -> keep [0, 1, 1, 0] at 0.1 and 0.9
    rate = np.array([0, 1, 5, 8]) / 8
    keep = selection.in_band(rate, EVERY, low=0.1, high=0.9)
    np.testing.assert_array_equal(keep, [False, True, True, False])
    unseen = selection.in_band(np.array([NAN, 1.0]), np.array([False, True]), low=0.1, high=0.9)
    np.testing.assert_array_equal(unseen, [True, False])
    edges = selection.in_band(np.array([0.25, 0.75]), EVERY[:2], low=0.25, high=0.75)
    np.testing.assert_array_equal(edges, [True, True])


def test_prompts_are_sampled_by_what_they_miss():
    # s = [0.25, 0.75, 1], no floor: 0.75 / (0.75 + 0.25 + 0) = 0.75, 0.25, 0
    weights = selection.sampling_weights(np.array([0.25, 0.75, 1.0]), EVERY[:3], exponent=1.0, floor=0.0)
    np.testing.assert_allclose(weights, [0.75, 0.25, 0], atol=1e-12)
    # squared: 0.5625, 0.0625, 0; over 0.625
    squared = selection.sampling_weights(np.array([0.25, 0.75, 1.0]), EVERY[:3], exponent=2.0, floor=0.0)
    np.testing.assert_allclose(squared, [0.9, 0.1, 0], atol=1e-12)
    # a new prompt counts as 0.5; with a floor of 0.1: 0.6 and 0.1, over 0.7
    new = selection.sampling_weights(np.array([NAN, 1.0]), np.array([False, True]), exponent=1.0, floor=0.1)
    np.testing.assert_allclose(new, [6 / 7, 1 / 7], atol=1e-12)
    solved = selection.sampling_weights(np.ones(4), EVERY, exponent=1.0, floor=0.0)
    np.testing.assert_allclose(solved, 0.25)
    # estimates outside [0, 1] count as the nearest rate: 0 and 1
    outside = selection.sampling_weights(np.array([-0.5, 1.5]), EVERY[:2], exponent=1.0, floor=0.0)
    np.testing.assert_array_equal(outside, [1, 0])


def test_the_hardest_are_kept_also_those_never_solved():
    # [0/64, 3/64, 40/64, 64/64], retain half -> the first two
    rate = np.array([0, 3, 40, 64]) / 64
    np.testing.assert_array_equal(selection.hardest(rate, share=0.5), [True, True, False, False])
    np.testing.assert_array_equal(selection.hardest(rate[::-1], share=0.5), [False, False, True, True])
    np.testing.assert_array_equal(selection.hardest(np.zeros(4), share=0.5), [True, True, False, False])
    np.testing.assert_array_equal(selection.hardest(rate, share=0.01), [True, False, False, False])


def test_a_share_of_the_hardest_is_not_rounded_to_one_less():
    rate = np.arange(100.0)
    assert [int(selection.hardest(rate, share=share).sum()) for share in (0.29, 0.57, 0.295, 1.0, 0.001)] == [
        29, 57, 29, 100, 1]  # fmt: skip


def test_unsolved_prompts_of_a_batch_are_capped():
    rate = np.array([0, 0.5, 0, 0, 1.0])
    np.testing.assert_array_equal(selection.cap_unsolved(rate, most=2), [True, True, True, False, True])
    np.testing.assert_array_equal(selection.cap_unsolved(rate, most=0), [False, True, False, False, True])


def test_learning_impact_by_hand():
    # 1 - (0.04 + 0 + 0.04) / (0.64 + 0.25 + 0.04) = 0.91398
    score = selection.learning_impact(np.array([[0, 0.5, 1]]), np.array([0.2, 0.5, 0.8]))
    np.testing.assert_allclose(score, 0.91398, atol=5e-6)
    mean = np.array([0.2, 0.5, 0.8])
    assert selection.learning_impact(mean[None], mean) == [1]
    assert selection.learning_impact(np.ones((2, 3)), np.ones(3)).tolist() == [-np.inf, -np.inf]


def test_missing_epochs_take_the_next_one_known():
    rates = np.array([[NAN, 0.5, NAN, 1, NAN], [NAN] * 5, [0.0, 0, 0, 0, 1]])
    filled, enough = selection.fill_epochs(rates, fewest=2)
    np.testing.assert_array_equal(filled, [[0.5, 0.5, 1, 1, 1], [0] * 5, [0, 0, 0, 0, 1]])
    np.testing.assert_array_equal(enough, [True, False, True])
    assert np.isnan(rates[0, 0])  # the input is as it was
    np.testing.assert_array_equal(selection.fill_epochs(np.array([[0.5, NAN, NAN]]), fewest=1)[0], [[0.5, 0.5, 0.5]])
    np.testing.assert_array_equal(selection.fill_epochs(np.array([[0.5, NAN, 1.0]]), fewest=1)[0], [[0.5, 1, 1]])
    assert selection.fill_epochs(rates, fewest=3)[1].tolist() == [False, False, True]
    assert selection.fill_epochs(rates, fewest=0)[1].tolist() == [True, False, True]
    assert selection.fill_epochs(np.array([[0.5, NAN, NAN]]), fewest=0)[1].tolist() == [True]


def test_prompts_are_ranked_by_the_variance_of_their_success():
    # variances: [0, 1, 0, 1] 0.25, [1, 1, 1, 1] 0, [0, NaN, 1, NaN] 0.25 over the known ones, [0.5, 0.5, 1, 1] 1/16
    # and [0, 0.9, 0, 0.9] 0.2025
    rates = np.array([[1, 1, 1, 1], [0.5, 0.5, 1, 1], [0, 1, 0, 1], [0, NAN, 1, NAN], [NAN] * 4, [0, 0.9, 0, 0.9]])
    assert selection.most_varied(rates, count=3).tolist() == [2, 3, 5]
    assert selection.most_varied(rates, count=1).tolist() == [2]
    assert selection.most_varied(rates, count=9).tolist() == [2, 3, 5, 1, 0, 4]
    one_known = np.array([[1, NAN], [0.4, 0.6]])  # variances 0, by definition, and 0.01
    assert selection.most_varied(one_known, count=1).tolist() == [1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_rounding_of_a_mean_ranks_no_prompt(dtype):
    # Three times 0.1 has the mean 0.10000000000000002 and a variance of 2e-34, where that of three times 1 is 0.
    constant = np.array([[1, 1, 1], [0.1, 0.1, 0.1], [0.7, 0.7, 0.7]], dtype)
    assert selection.most_varied(constant, count=3).tolist() == [0, 1, 2]
    sixths = [rates for rates in itertools.product(np.arange(7) / 6, repeat=3) if len(set(rates)) > 1]
    for rates in sixths:  # the same rates in every order: all tie
        orders = np.array(list(itertools.permutations(rates)), dtype)
        assert selection.most_varied(orders, count=6).tolist() == [0, 1, 2, 3, 4, 5], rates


RULE = LevelRule(window=20, up=0.7, down=0.1, lowest=0, highest=3)


@pytest.mark.parametrize(
    ("level", "scores", "after", "left"),
    [
        (0, [1.0] * 15 + [0.0] * 5, 1, 0),  # mean 0.75: one up, scores forgotten
        (0, [1.0] + [0.0] * 19, 0, 20),  # mean 0.05 at the lowest: stays, and remembers
        (2, [1.0] + [0.0] * 19, 1, 0),
        (3, [1.0] * 20, 3, 20),  # at the highest
        (1, [1.0] * 14 + [0.0] * 6, 1, 20),  # mean 0.7 is not above it
        (1, [1.0] * 19, 1, 19),  # too few
        (1, [1.0] * 50 + [0.0] * 20, 0, 0),  # the last 20 alone
        (1, [1.0, 1.0] + [0.0] * 18, 1, 20),  # mean 0.1 is not below it
    ],
)
def test_a_level_follows_the_scores_at_it(level, scores, after, left):
    found, kept = next_level(level, scores, RULE)
    assert (found, len(kept)) == (after, left)


def test_a_level_rule_that_could_not_settle_is_refused():
    with pytest.raises(ValueError, match="down <= up"):
        LevelRule(up=0.1, down=0.7)


def test_tasks_are_mixed_by_a_power_of_their_sizes():
    # n = [100, 900], alpha 0.5: 10 / (10 + 30) = 0.25
    np.testing.assert_allclose(size_shares(np.array([100, 900]), alpha=0.5), [0.25, 0.75])
    np.testing.assert_allclose(size_shares(np.array([100, 900]), alpha=1.0), [0.1, 0.9])
    np.testing.assert_allclose(size_shares(np.array([100, 900, 0]), alpha=0.0), [0.5, 0.5, 0])
    np.testing.assert_allclose(size_shares(np.array([1, 3]), alpha=1.0), [0.25, 0.75])
    with pytest.raises(ValueError, match="no task has an example"):
        size_shares(np.array([0, 0]), alpha=0.5)


def test_tasks_are_mixed_by_their_progress():
    # progress 0.3, 0.1 (a loss counts), and a new task as the largest: 0.3; floor 0.1: 0.4, 0.2, 0.4 over 1
    shares = progress_shares(
        np.array([0.1, 0.5, NAN]), np.array([0.4, 0.4, NAN]), np.array([True, True, False]), floor=0.1
    )
    np.testing.assert_allclose(shares, [0.4, 0.2, 0.4])
    none = progress_shares(np.zeros(2), np.zeros(2), np.ones(2, bool), floor=0.0)
    np.testing.assert_allclose(none, 0.5)


def test_a_task_is_drawn_by_its_share():
    shares = np.array([0.25, 0.0, 0.75])
    assert [draw_task(shares, u) for u in (0.0, 0.2499, 0.25, 0.999)] == [0, 0, 2, 2]
    assert draw_task(np.array([1.0, 0.0]), 1 - 1e-17) == 0
    assert [draw_task(np.array([1.0, 3.0]), u) for u in (0.2, 0.3)] == [0, 1]  # shares of any sum
    draws = [draw_task(shares, (i + 0.5) / 400) for i in range(400)]
    assert [draws.count(task) for task in range(3)] == [100, 0, 300]
