from __future__ import annotations

import itertools
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest

from jrl.ops import statistics
from jrl.ops.statistics import (
    best_of_n,
    best_of_n_kl,
    bootstrap_interval,
    clustered_bootstrap,
    interquartile_mean,
    majority,
    majority_at_k,
    optimality_gap,
    pass_at_k,
    performance_profile,
    probability_of_improvement,
    problem_means,
    proportion_interval,
    share_interval,
    stratified_bootstrap,
    wilson,
)  # fmt: skip


def test_wilson_on_eight_of_ten():
    # z = 1.959964, z^2 = 3.841459; center (0.8 + 3.841459/20) / 1.3841459 = 0.716740
    # half 1.959964 sqrt(0.16/10 + 3.841459/400) / 1.3841459 = 1.959964 * 0.1600114 / 1.3841459 = 0.226577
    low, high = wilson(8, 10)
    assert low == pytest.approx(0.490163, abs=2e-6)
    assert high == pytest.approx(0.943317, abs=2e-6)


def test_wilson_keeps_its_width_at_the_ends():
    # 0 of n: [0, z^2 / (n + z^2)] = [0, 3.841459 / 13.841459]
    low, high = wilson(0, 10)
    assert (low, high) == (0.0, pytest.approx(0.277533, abs=2e-6))
    assert wilson(10, 10) == (pytest.approx(1 - high), 1.0)


def test_wilson_refuses_what_is_no_proportion():
    for successes, n in ((1, 0), (-1, 4), (5, 4), (math.nan, 4)):
        with pytest.raises(ValueError, match="wilson"):
            wilson(successes, n)


def test_one_sample_a_problem_gives_plain_wilson():
    correct = np.array([1] * 8 + [0] * 2)[:, None]
    assert proportion_interval(correct) == (0.8, *wilson(8, 10), 10)


def test_samples_that_always_agree_count_once():
    correct = np.array([1] * 8 + [0] * 2)[:, None]
    assert proportion_interval(np.repeat(correct, 4, axis=1)) == proportion_interval(correct)


def test_samples_that_spread_alike_in_every_problem_count_each():
    # every problem mean is 1/2: their spread is 0, so the 4 * 2 samples are as good as independent
    assert proportion_interval([[0, 1], [1, 0], [0, 1], [1, 0]]) == (0.5, *wilson(4, 8), 4)


def test_effective_number_of_samples_between_the_two():
    # problem means 0, 1/2, 1/2, 1: mean 1/2, variance (1/4 + 0 + 0 + 1/4) / 3 = 1/6, SE^2 = 1/24
    # effective (1/4) / (1/24) = 6, between 4 problems and 8 samples
    assert proportion_interval([[0, 0], [0, 1], [1, 0], [1, 1]]) == pytest.approx((0.5, *wilson(3, 6), 4))


def test_interval_is_never_empty_where_everything_is_right():
    assert proportion_interval(np.ones((5, 3))) == (1.0, wilson(5, 5)[0], 1.0, 5)


def test_unscored_samples_do_not_count():
    correct = np.array([[1, 0], [0, 7], [1, 1]])
    scored = np.array([[True, False], [False, False], [True, True]])
    assert proportion_interval(correct, scored) == (1.0, wilson(2, 2)[0], 1.0, 2)
    assert problem_means(correct, scored).tolist() == [1.0, 1.0]
    none = proportion_interval(correct, np.zeros((3, 2), bool))
    assert none.n == 0 and math.isnan(none.mean) and math.isnan(none.low)


def test_proportion_refuses_scores_that_are_not_outcomes():
    with pytest.raises(ValueError, match="0 or 1"):
        proportion_interval([[0.5]])
    with pytest.raises(ValueError, match=r"\[problems, samples\]"):
        proportion_interval([1, 0])


def test_wilson_covers_the_true_rate_with_clustered_samples():
    # Problems with rates drawn from Beta(1, 3), mean 1/4; 40 problems, 4 samples each. Nominal 95 %; naive Wilson
    # on the 160 samples covers about 86 %.
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(1000):
        correct = rng.random((40, 4)) < rng.beta(1, 3, (40, 1))
        _, low, high, _ = proportion_interval(correct)
        covered += low <= 0.25 <= high
    assert 0.93 <= covered / 1000 <= 0.98


def test_bootstrap_of_two_values():
    # resamples of [0, 1] have mean 0, 1/2 or 1 with chance 1/4, 1/2, 1/4: the 95 % interval is all of it, and the
    # middle 40 % (from the 30th to the 70th percentile) is 1/2 alone
    assert bootstrap_interval([0, 1]) == (0.5, 0.0, 1.0, 2)
    assert bootstrap_interval([0, 1], confidence=0.4) == (0.5, 0.5, 0.5, 2)


def test_bootstrap_agrees_with_the_normal_interval_on_many_values():
    values = np.random.default_rng(1).normal(size=400)
    half = 1.959964 * values.std(ddof=1) / 20
    mean, low, high, n = bootstrap_interval(values)
    assert n == 400
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.01)


def test_bootstrap_is_reproducible_and_zero_wide_on_a_constant():
    values = np.random.default_rng(0).random(30)
    assert bootstrap_interval(values) == bootstrap_interval(values)
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values)
    assert bootstrap_interval([0.25] * 5) == (0.25, 0.25, 0.25, 5)


def test_bootstrap_of_one_or_no_problem_has_no_interval():
    one, none = bootstrap_interval([0.5]), bootstrap_interval([])
    assert (one.mean, one.n, none.n) == (0.5, 1, 0)
    assert all(map(math.isnan, (one.low, one.high, none.mean, none.low, none.high)))
    with pytest.raises(ValueError, match="finite"):
        bootstrap_interval([0.5, math.nan])


def test_problem_means_on_the_reference_numbers():
    # means [.5, 1, 0]: avg@k 0.5, SE std1 / sqrt 3 = 0.5 / 1.7320508 = 0.288675
    means = problem_means([[0, 1], [1, 1], [0, 0]])
    assert means.tolist() == [0.5, 1.0, 0.0]
    assert means.std(ddof=1) / math.sqrt(3) == pytest.approx(0.288675, abs=1e-6)
    scored = [[True, False], [False, False], [True, True], [True, True]]
    scores = [[1, math.nan], [math.nan, math.nan], [0, 1], [1, 1]]
    assert problem_means(scores, scored).tolist() == [1.0, 0.5, 1.0]


def test_an_interval_of_equal_shares_has_a_width():
    # Wilson, 0 of 20, z = 1.96: the upper end is z^2 / (n + z^2) = 3.8415 / 23.8415 = 0.1611
    assert share_interval(np.zeros(20)) == pytest.approx((0, 0, 0.1611, 20), abs=1e-4)
    assert share_interval(np.ones(20)) == pytest.approx((1, 1 - 0.1611, 1, 20), abs=1e-4)
    assert share_interval([0.0, 1.0, 0.5]) == bootstrap_interval([0.0, 1.0, 0.5])
    assert np.isnan(share_interval([])[:3]).all()


def test_pass_at_k_by_hand():
    # n 5, c 2, k 2: 1 - C(3,2)/C(5,2) = 1 - 3/10; product (1 - 2/4)(1 - 2/5) = 0.3
    # n 5, c 4, k 2: fewer wrong than drawn, so 1.  n 5, c 0: 0
    assert pass_at_k([2, 4, 0], 5, 2) == pytest.approx([0.7, 1.0, 0.0])
    assert pass_at_k([3], [4], 1) == pytest.approx([0.75])


def test_pass_at_k_equals_the_formula_and_the_enumeration():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            formula = 1 - math.comb(n - c, k) / math.comb(n, k)
            hits = [min(subset) < c for subset in itertools.combinations(range(n), k)]
            assert pass_at_k([c], n, k)[0] == pytest.approx(formula, abs=1e-12)
            assert formula == pytest.approx(sum(hits) / len(hits), abs=1e-12)


def test_pass_at_k_does_not_overflow():
    # C(10000, 5000) has 3,009 digits; one correct of n: k / n
    assert pass_at_k([1, 10_000], 10_000, 5_000) == pytest.approx([0.5, 1.0])


def test_pass_at_k_refuses_too_few_samples():
    with pytest.raises(ValueError, match="fewest 3"):
        pass_at_k([1, 1], [4, 3], 4)
    for correct in (5, -1):
        with pytest.raises(ValueError, match="between 0 and"):
            pass_at_k([correct], 4, 2)
    with pytest.raises(ValueError, match="k = 0"):
        pass_at_k([1], 4, 0)


def test_best_of_n_by_hand():
    assert best_of_n([[0.1, 0.7, 0.7], [0.5, 0.2, 0.1]]).tolist() == [1, 0]  # the first of two that tie
    assert best_of_n([[-2.0, -1.0]]).tolist() == [1]
    # What was not scored is never chosen, and nobody where nothing was.
    scored = [[True, False, True], [False, True, True], [False] * 3]
    assert best_of_n([[0.1, 9.0, 0.7], [np.nan, -3.0, -4.0], [1.0] * 3], scored).tolist() == [2, 1, -1]
    assert best_of_n([[5.0]]).tolist() == [0]


def test_the_kl_of_the_best_of_n_by_hand():
    # log 4 - 3/4 = 1.386294 - 0.75
    assert best_of_n_kl(4) == pytest.approx(0.636294, abs=1e-6) and best_of_n_kl(1) == 0
    with pytest.raises(ValueError, match="n = 0"):
        best_of_n_kl(0)


def test_the_bound_is_the_kl_of_the_best_where_no_two_rewards_are_equal():
    # The best of n of m equally likely answers is the i-th with probability (i^n - (i - 1)^n) / m^n.
    n, m = 4, 2000
    share = (np.arange(1, m + 1) / m) ** n - (np.arange(m) / m) ** n
    assert np.sum(share * np.log(share * m)) == pytest.approx(best_of_n_kl(n), abs=1e-2)


def test_majority_by_hand():
    # 5 has 3 of the 5 votes; the unreadable one does not vote
    assert majority(["3", "5", "5", None, "3", "5"]) == "5"
    # 3 has 0.9 + 0.1 = 1.0, 5 has 0.2 + 0.2 + 0.2 = 0.6
    assert majority(["3", "5", "5", None, "3", "5"], [0.9, 0.2, 0.2, 1, 0.1, 0.2]) == "3"


def test_majority_tie_goes_to_the_first_seen_and_nobody_gives_none():
    assert majority(["b", "a", "a", "b"]) == "b"
    assert majority([None, "a", None, "b"]) == "a"
    assert majority([None, None]) is None
    assert majority([]) is None
    with pytest.raises(ValueError, match="2 answers, 1 weights"):
        majority(["a", "b"], [1.0])


def test_majority_at_k_by_hand():
    answers, correct = ["A", "A", "B"], [True, True, False]
    assert majority_at_k(answers, correct, 3) == 1.0
    assert majority_at_k(answers, correct, 1) == pytest.approx(2 / 3)
    # pairs AA, AB, AB: A wins all three, the ties because it is seen first; reversed, B wins both ties
    assert majority_at_k(answers, correct, 2) == 1.0
    assert majority_at_k(answers[::-1], correct[::-1], 2) == pytest.approx(1 / 3)


def test_majority_at_k_is_the_mean_over_subsets_of_the_majority():
    rng = np.random.default_rng(3)
    for _ in range(50):
        n = int(rng.integers(1, 9))
        answers = [(None, "a", "b", "c")[i] for i in rng.integers(4, size=n)]
        outcome = {None: False, "a": True, "b": False, "c": True}
        correct = [answer is not None and outcome[answer] for answer in answers]
        for k in range(1, n + 1):  # C(8, 4) = 70 subsets at most
            wins = [outcome[majority(subset)] for subset in itertools.combinations(answers, k)]
            assert majority_at_k(answers, correct, k) == sum(wins) / len(wins)


def test_majority_at_k_counts_the_unreadable_as_wrong():
    assert majority_at_k([None, None, "A"], [False, False, True], 1) == pytest.approx(1 / 3)
    assert majority_at_k([None], [True], 1) == 0.0
    with pytest.raises(ValueError, match="k = 2 of 1"):
        majority_at_k(["A"], [True], 2)


def test_majority_at_k_of_many_samples_comes_near_the_exact_mean():
    # 12 right, 12 wrong and different: with k = 3, right unless at most one of three is right and not the first seen
    answers = ["A"] * 12 + [f"w{i}" for i in range(12)]
    correct = [True] * 12 + [False] * 12
    # A comes first, so A wins with at least one A among the 3: 1 - C(12,3)/C(24,3) = 1 - 220/2024 = 0.891304
    assert majority_at_k(answers, correct, 3, draws=5000) == pytest.approx(0.891304, abs=1e-6)
    assert majority_at_k(answers, correct, 3, draws=1000) == pytest.approx(0.891304, abs=0.03)
    assert majority_at_k(answers, correct, 3) == majority_at_k(answers, correct, 3)


def test_interquartile_mean_by_hand():
    # 8 scores, 2 cut at each end whatever their order: mean(2, 3, 4, 5) = 3.5
    assert interquartile_mean([100, 5, 0, 4, 1, 3, 6, 2]) == 3.5
    assert interquartile_mean([[0, 1, 2, 3, 4, 5, 6, 100], [1] * 8]).tolist() == [3.5, 1.0]


def test_interquartile_mean_trims_the_floor_of_a_quarter():
    # 7 scores: floor(7/4) = 1 at each end, mean(1, 2, 3, 4, 5) = 3; 3 scores: none, mean(0, 1, 8) = 3
    assert interquartile_mean([0, 1, 2, 3, 4, 5, 99]) == 3.0
    assert interquartile_mean([0, 1, 8]) == 3.0
    assert interquartile_mean([0, 1, 2, 9]) == 1.5  # the first length that is cut
    assert math.isnan(interquartile_mean([])) and math.isnan(statistics.mean([]))


def resamples(values):
    """Every resample of a list, each as likely as any other."""
    return [list(drawn) for drawn in itertools.product(values, repeat=len(values))]


def between(quantiles, values):
    """The quantiles of a percentile interval, of values that are all there are."""
    return np.quantile(np.sort(values), quantiles)


def test_stratified_bootstrap_equals_the_enumeration_of_all_resamples():
    # 27 resamples of the first task times 27 of the second. The ends of the 50 % interval are not near a jump of the
    # exact distribution of the interquartile mean, so that 10,000 draws give its quantiles exactly.
    tasks = [[0, 1, 4], [10, 12, 20]]
    exact = np.array([interquartile_mean(a + b) for a in resamples(tasks[0]) for b in resamples(tasks[1])])
    low, high = between([0.25, 0.75], exact)
    for shift in (-0.02, 0.02):
        assert between([0.25 + shift, 0.75 + shift], exact).tolist() == [low, high]
    drawn = stratified_bootstrap(tasks, interquartile_mean, confidence=0.5)
    # 6 scores, 1 cut at each end: mean(1, 4, 10, 12) = 6.75
    assert drawn == pytest.approx((6.75, low, high, 6))
    assert stratified_bootstrap(tasks, interquartile_mean, confidence=0.5) == drawn


def test_stratified_bootstrap_never_moves_a_run_to_another_task():
    # tasks of constant runs: whatever is drawn, two zeros and two tens, mean 5; drawn from all four it would vary
    assert stratified_bootstrap([[0, 0], [10, 10]]) == (5.0, 5.0, 5.0, 4)
    mixed = stratified_bootstrap([[0, 0, 10, 10]])
    assert mixed.low < 5 < mixed.high


def test_stratified_bootstrap_of_one_task_is_the_bootstrap():
    values = np.random.default_rng(0).random(12)
    assert stratified_bootstrap([values]) == pytest.approx(bootstrap_interval(values))
    wide, narrow = stratified_bootstrap([values], confidence=0.99), stratified_bootstrap([values], confidence=0.5)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_one_run_has_no_interval_over_runs():
    one = stratified_bootstrap([[1, 2, 3], [5]])
    assert one.mean == 2.75 and math.isnan(one.low) and math.isnan(one.high) and one.n == 4
    none = stratified_bootstrap([])
    assert none.n == 0 and math.isnan(none.mean)
    with pytest.raises(ValueError, match="finite"):
        stratified_bootstrap([[1, math.nan]])


def test_performance_profile_by_hand():
    # above 0.5: 0.6 and 0.9 of three; at a threshold that is a score, that score is not above it
    assert performance_profile([0.2, 0.6, 0.9], [0.5, 0.0, 0.6, 0.9]) == pytest.approx([2 / 3, 1, 1 / 3, 0])
    assert np.isnan(performance_profile([], [0.5])).all()


def test_probability_of_improvement_by_hand():
    # pairs of [1, 2, 3] and [2, 2]: (0 + 0 + 1/2 + 1/2 + 1 + 1) / 6 = 0.5
    assert probability_of_improvement([[1, 2, 3]], [[2, 2]]).mean == 0.5
    # 3 beats both of [2, 2], 1 none: 2/4; 5 and 6 beat 4: 1; mean over tasks 0.75, whatever their number of runs
    found = probability_of_improvement([[1, 3], [5, 6]], [[2, 2], [4]])
    assert found.mean == 0.75 and found.n == 4 and math.isnan(found.low)
    assert probability_of_improvement([[5, 6]], [[1, 2]]) == (1.0, 1.0, 1.0, 2)
    assert probability_of_improvement([[5, 6], [1, 2]], [[1, 2], [5, 6]], draws=9) == (0.5, 0.5, 0.5, 4)


def test_probability_of_improvement_and_of_the_opposite_sum_to_one():
    x, y = np.random.default_rng(0).integers(5, size=(2, 9))
    there, back = (probability_of_improvement([a], [b]) for a, b in ((x, y), (y, x)))
    assert there.mean + back.mean == pytest.approx(1)
    assert probability_of_improvement([x], [x]).mean == 0.5


def test_probability_of_improvement_equals_the_enumeration_of_all_resamples():
    x, y = [1, 4, 6], [2, 5, 7]  # resampled on one side alone, the ends would be other ones
    chance = lambda a, b: np.mean([(i > j) + 0.5 * (i == j) for i in a for j in b])
    exact = np.array([chance(a, b) for a in resamples(x) for b in resamples(y)])
    low, high = between([0.1, 0.9], exact)
    for shift in (-0.02, 0.02):
        assert between([0.1 + shift, 0.9 + shift], exact).tolist() == pytest.approx([low, high])
    # 4 beats 2, 6 beats 2 and 5: 3/9
    assert probability_of_improvement([x], [y], confidence=0.8) == pytest.approx((1 / 3, low, high, 3))


def test_probability_of_improvement_refuses_tasks_that_do_not_match():
    with pytest.raises(ValueError, match="2 tasks against 1"):
        probability_of_improvement([[1], [2]], [[1]])


def test_probability_of_improvement_of_a_task_without_runs_is_unknown():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no mean of nothing is taken
        assert math.isnan(probability_of_improvement([[]], [[1]]).mean)
        found = probability_of_improvement([[1, 2], [3, 4]], [[1, 2], []])
        assert math.isnan(found.mean) and math.isnan(found.low) and found.n == 4


def test_optimality_gap_by_hand():
    # 1 - mean(0.2, 0.6, 1.0) = 0.4: what is above 1 makes up for nothing
    assert optimality_gap([0.2, 0.6, 1.5], 1.0) == pytest.approx(0.4)
    assert optimality_gap([[2, 3], [0, 1]], 2.0).tolist() == [0.0, 1.5]


def test_statistics_import_no_jax():
    code = "import sys, jrl.ops.statistics; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_a_clustered_bootstrap_equals_the_enumeration_of_resampled_problems():
    # Problems of 1 and 3 rows with sums 1 and 0: of both 1/4, drawn twice 1 or 0, so that the interval is [0, 1].
    problems = [np.array([1.0]), np.array([0.0, 0.0, 0.0]), np.zeros(0)]
    found = clustered_bootstrap(problems, np.mean)
    assert found == (0.25, 0.0, 1.0, 2)  # the problem without rows is none
    # A third draws it with every problem: quantiles of the 27 equally likely means.
    problems = [np.array([1.0]), np.array([0.0, 0.0, 0.0]), np.array([1.0, 0.0])]
    means = [np.mean(np.concatenate([problems[i] for i in drawn])) for drawn in itertools.product(range(3), repeat=3)]
    found = clustered_bootstrap(problems, np.mean, draws=20_000, confidence=0.8)
    assert (found.low, found.high) == tuple(np.quantile(means, [0.1, 0.9], method="inverted_cdf"))
    assert np.isnan(clustered_bootstrap(problems[:1], np.mean).low)
    nothing = clustered_bootstrap([], np.mean)
    assert np.isnan(nothing.mean) and nothing.n == 0
