"""Statistics of evaluations against SciPy, which computes them another way: to 1e-12, or within Monte-Carlo error."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from jrl.ops import statistics

pytestmark = pytest.mark.fast


def test_wilson_is_that_of_scipy():
    for n in (1, 7, 40, 1000):
        for k in sorted({0, 1, n // 3, n - 1, n}):
            for confidence in (0.8, 0.95):
                expected = stats.binomtest(k, n).proportion_ci(confidence, method="wilson")
                np.testing.assert_allclose(statistics.wilson(k, n, confidence=confidence), expected, atol=1e-12)


def test_pass_at_k_is_the_tail_of_a_hypergeometric_distribution():
    for n in (1, 5, 16, 64):
        correct = np.arange(n + 1)
        for k in sorted({1, (n + 1) // 2, n}):
            expected = stats.hypergeom(n, correct, k).sf(0)
            np.testing.assert_allclose(statistics.pass_at_k(correct, n, k), expected, atol=1e-12)


def test_the_interquartile_mean_is_a_trimmed_mean():
    rng = np.random.default_rng(0)
    for n in (4, 5, 6, 7, 8, 33, 100):
        scores = rng.normal(size=n)
        np.testing.assert_allclose(statistics.interquartile_mean(scores), stats.trim_mean(scores, 0.25), atol=1e-12)


def test_the_probability_of_improvement_is_mann_and_whitneys_statistic():
    rng = np.random.default_rng(1)
    for n, m in ((3, 5), (10, 10), (40, 7)):
        x, y = rng.integers(0, 6, n).astype(float), rng.integers(0, 6, m).astype(float)  # with ties
        expected = stats.mannwhitneyu(x, y).statistic / (n * m)
        found = statistics.probability_of_improvement([x], [y], draws=10)
        np.testing.assert_allclose(found.mean, expected, atol=1e-12)


@pytest.mark.parametrize("name", ["mean", "interquartile_mean"])
def test_an_end_of_a_bootstrap_interval_is_within_the_monte_carlo_error_of_scipys(name):
    scores, draws = np.random.default_rng(2).gamma(2.0, size=30), 20_000
    statistic = getattr(statistics, name)
    expected = stats.bootstrap((scores,), lambda x, axis: statistic(np.moveaxis(x, axis, -1)), n_resamples=draws,
                               method="percentile", vectorized=True, rng=np.random.default_rng(3))  # fmt: skip
    found = statistics.stratified_bootstrap([scores], statistic, draws=draws)
    # The standard error of a quantile q of m draws is sqrt(q (1 - q) / m) / density, the density from the draws between
    # the quantiles q - 0.01 and q + 0.01; of a difference it is sqrt(2) times that. Four of them.
    for end, low, high in ((0.025, found.low, expected.confidence_interval.low),
                           (0.975, found.high, expected.confidence_interval.high)):  # fmt: skip
        around = np.diff(np.quantile(expected.bootstrap_distribution, [end - 0.01, end + 0.01]))[0]
        error = np.sqrt(2 * end * (1 - end) / draws) * around / 0.02
        assert abs(low - high) < 4 * error < 0.05


def test_a_bootstrap_interval_of_problems_is_scipys_too():
    values, draws = np.random.default_rng(4).random(25), 20_000
    expected = stats.bootstrap((values,), np.mean, n_resamples=draws, method="percentile", rng=np.random.default_rng(5))
    found = statistics.bootstrap_interval(values, draws=draws)
    assert found.mean == pytest.approx(values.mean(), abs=1e-12)
    np.testing.assert_allclose([found.low, found.high], expected.confidence_interval, atol=6e-3)
