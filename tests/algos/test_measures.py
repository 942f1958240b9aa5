"""Measures of policies and reward models (M4, M5, M11 to M19), by hand and against enumeration."""

from __future__ import annotations

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.special
from small_batches import tokens

from jrl.algos.common import Clipped, clip_metrics, common_metrics
from jrl.learning.learner import LARGEST, mean_metrics
from jrl.ops.calibration import auroc, brier, expected_calibration_error
from jrl.ops.mismatch import (
    effective_sample_size,
    mismatch_of_means,
    mismatch_terms,
    probability_difference,
    sampler_mismatch,
)
from jrl.ops.over_optimization import over_optimization
from jrl.ops.reward_model_quality import best_of_many, instruction_consistency, pair_accuracy
from jrl.ops.statistics import all_of_k, expected_best_of_k, self_correction
from jrl.ops.win_rates import length_controlled, swapped_wins, win_rate
from jrl.tasks.data.diversity import distinct_ngrams, embedding_distance, mean_self_bleu

NAN = float("nan")


def test_expected_best_of_k_equals_the_enumeration():
    assert expected_best_of_k([3, 1, 2], 2) == pytest.approx(8 / 3)  # 1/3 * 2 + 2/3 * 3
    rewards = np.random.default_rng(0).normal(size=7)
    for k in (1, 3, 7):
        every = np.mean([max(subset) for subset in itertools.combinations(rewards, k)])
        assert expected_best_of_k(rewards, k) == pytest.approx(every, abs=1e-12)
    with pytest.raises(ValueError, match="k = 8 of 7"):
        expected_best_of_k(rewards, 8)


def test_all_of_k_equals_the_enumeration():
    np.testing.assert_allclose(all_of_k([3, 1, 5], 5, 2), [0.3, 0, 1], atol=1e-12)  # C(3, 2) / C(5, 2)
    right = [True, True, True, False, False, True]
    every = np.mean([all(subset) for subset in itertools.combinations(right, 3)])
    np.testing.assert_allclose(all_of_k([4], 6, 3), every, atol=1e-12)


def test_self_correction_by_hand():
    found = self_correction([1, 0, 0, 1], [1, 1, 0, 0])
    assert found == {"first": 0.5, "second": 0.5, "gained": 0.0, "corrected": 0.25, "broken": 0.25}
    missing = self_correction([1, NAN, 0], [NAN, 1, 1])
    assert missing == {"first": 0.5, "second": 0.5, "gained": 0.0, "corrected": 0.5, "broken": 0.5}
    assert np.isnan(self_correction([], [])["gained"])
    for first, second in (([1, 0], [1]), ([[1, 0]], [[1, 1]])):
        with pytest.raises(ValueError, match="attempts \\[problems\\]"):
            self_correction(first, second)


def test_win_rate_by_hand():
    found = win_rate([1, 1, 1, 0.5, 0.5, 0, 0, 0, 0, 0, NAN])
    assert (found.mean, found.n) == (pytest.approx(0.4), 10) and found.low < 0.4 < found.high
    # Of two prompts 1/4 of the resamples are two wins and 1/4 none.
    assert win_rate([1, NAN, 0]) == (0.5, 0.0, 1.0, 2) and np.isnan(win_rate([NAN]).mean)
    # a judge that always takes the first place says nothing; one that fails in one order is left out
    np.testing.assert_array_equal(swapped_wins([1, 1, 0.5, NAN], [0, 1, 1, 1]), [0.5, 1, 0.75, NAN])


def test_equal_outcomes_have_a_win_rate_with_wilsons_interval():
    # n of n: from n / (n + z^2) to 1, z^2 = 1.959964^2 = 3.841459: 3 / 6.841459 and, of one prompt, 1 / 4.841459
    assert win_rate([1, 1, NAN, 1]) == (1.0, pytest.approx(0.438503, abs=1e-6), 1.0, 3)
    assert win_rate([1, NAN]) == (1.0, pytest.approx(0.206549, abs=1e-6), 1.0, 1)
    assert win_rate([0, 0, 0]) == (0.0, 0.0, pytest.approx(1 - 0.438503, abs=1e-6), 3)
    # Ties: 1/2 -+ z / (2 sqrt(n + z^2)), sqrt(4 + 3.841459) = 2.800260
    assert win_rate([0.5] * 4)[1:3] == pytest.approx((0.5 - 0.349961, 0.5 + 0.349961), abs=1e-6)


def test_a_length_controlled_win_rate_takes_out_what_length_wins():
    # Longer answers win, whoever gives them: at equal lengths neither is better.
    difference = np.array([10.0, 10, 10, -10, -10, -10])
    assert length_controlled([1, 1, 0, 0, 0, 1], difference) == pytest.approx(0.5, abs=1e-6)
    skewed = np.array([10.0] * 9 + [-10.0] * 3)
    wins = np.array([1] * 6 + [0] * 3 + [1] + [0] * 2)  # 2/3 where longer, 1/3 where shorter
    assert wins.mean() > 0.58 and length_controlled(wins, skewed) == pytest.approx(0.5, abs=0.08)
    # Lengths count by their deviation alone: tenths of a token say what tens of tokens do.
    assert length_controlled(wins, skewed / 100) == pytest.approx(length_controlled(wins, skewed), abs=1e-9)
    # Without a difference it is the win rate, but for the ridge; with one policy winning always it stays below 1.
    assert length_controlled([1, 1, 0, NAN], np.zeros(4)) == pytest.approx(2 / 3, abs=1e-3)
    assert 0.99 < length_controlled(np.ones(50), np.arange(50.0)) < 1
    assert np.isnan(length_controlled([NAN], [1.0]))
    assert length_controlled([1, 0, NAN], [0.0, 0.0, NAN], [0.5, 0.5, NAN]) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="length difference"):
        length_controlled([1, 0], [1.0, np.inf])
    with pytest.raises(ValueError, match="difficulty"):
        length_controlled([1, 0], [1.0, 2.0], [0.5, NAN])
    assert length_controlled([1, 0, 1, 0], np.zeros(4), np.array([0.9, 0.1, 0.8, 0.2])) == pytest.approx(0.5, abs=0.01)


def test_a_step_of_newtons_that_goes_too_far_is_halved():
    # Differences of a deviation of 1, so that the columns are 1, tanh(+-1) and the difficulty. Whole steps end where
    # three of the four chances at equal lengths are 1; the minimum that scipy finds without derivatives has 0.49963.
    wins, difference, difficulty = np.array([1.0, 1, 0, 0]), np.array([1.0, -1, 1, -1]), np.array([50.0, 0, 2, -1])
    features = np.stack([np.ones(4), np.tanh(difference), difficulty], axis=1)
    loss = lambda w: np.logaddexp(0, (1 - 2 * wins) * (features @ w)).sum() + 1e-3 / 2 * w @ w
    tight = dict(maxiter=20_000, xatol=1e-8, fatol=1e-12)
    found = scipy.optimize.minimize(loss, np.zeros(3), method="Nelder-Mead", options=tight).x
    expected = np.mean(1 / (1 + np.exp(-(found[0] + found[2] * difficulty))))
    assert expected == pytest.approx(0.49963, abs=1e-5)
    assert length_controlled(wins, difference, difficulty) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("seed", [0, 161, 174, 233, 472, 519, 1164, 1942])
def test_a_length_controlled_win_rate_is_that_of_scipys_minimum(seed):
    """Of few prompts, most of them separable and with difficulties of any size, where a step that is taken by another
    objective than the one that is minimized ends elsewhere."""
    rng = np.random.default_rng(seed)
    n, size = rng.integers(3, 9), 10 ** rng.uniform(-1, 3)
    wins = rng.integers(0, 2, n).astype(float)
    difference, difficulty = rng.normal(size=n), rng.normal(size=n) * size
    features = np.stack([np.ones(n), np.tanh(difference / difference.std()), difficulty], axis=1)
    scale = abs(features).max(axis=0)
    z, ridge = features / scale, 1e-3 / scale**2  # of coefficients that are as large as each other
    chance = lambda u: scipy.special.expit(z @ u)
    found = scipy.optimize.minimize(
        lambda u: np.logaddexp(0, z @ u).sum() - wins @ z @ u + (ridge * u**2).sum() / 2,
        np.zeros(3),
        jac=lambda u: z.T @ (chance(u) - wins) + ridge * u,
        hess=lambda u: (z * (chance(u) * (1 - chance(u)))[:, None]).T @ z + np.diag(ridge),
        method="trust-exact",
        options=dict(gtol=1e-12, maxiter=5000),
    )
    w = found.x / scale
    expected = scipy.special.expit(w[0] + w[2] * difficulty).mean()
    assert length_controlled(wins, difference, difficulty) == pytest.approx(expected, abs=1e-6)


def test_calibration_by_hand():
    assert brier([0.9, 0.6], [1, 0]) == pytest.approx(0.185)
    assert expected_calibration_error([0.9, 0.6], [1, 0]) == pytest.approx(0.35)  # (0.1 + 0.6) / 2
    assert expected_calibration_error([0.5, 0.5], [1, 0]) == 0 and expected_calibration_error([1.0], [1]) == 0
    # 1 is in the bin of 0.9: |1 - 1.9| / 2
    assert expected_calibration_error([1.0, 0.9], [0, 1]) == pytest.approx(0.45)
    # of one bin |1/2 - 0.75|; of ten (0.1 + 0.6) / 2
    assert expected_calibration_error([0.9, 0.6], [1, 0], bins=1) == pytest.approx(0.25)
    assert auroc([0.9, 0.6, 0.6, 0.1], [1, 1, 0, 0]) == pytest.approx((2 + 1.5) / 4)
    assert auroc([0.1, 0.9], [1, 0]) == 0 and np.isnan(auroc([0.5], [1])) and np.isnan(brier([], []))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(auroc([0.5], [0])) and np.isnan(auroc([], []))
    with pytest.raises(ValueError, match="between 0 and 1"):
        brier([1.2], [1])
    with pytest.raises(ValueError, match="between 0 and 1"):
        auroc([NAN, 0.5], [1, 0])


def test_reward_model_quality_by_hand():
    assert pair_accuracy([0.7] * 3, [0.6, 0.65, 0.8]) == pytest.approx(2 / 3)
    assert pair_accuracy([1, 1, NAN], [1, 0, 0]) == 0.75
    assert best_of_many([0.7], [[0.6, 0.65, 0.8]]) == 0 and best_of_many([0.7], [[0.6, 0.65, NAN]]) == 1
    # a tie fails; a problem without a reward or without a wrong answer is left out
    assert best_of_many([0.7, 0.9, NAN, 0.5], [[0.7, 0.1], [0.1, NAN], [0.1, 0.2], [NAN, NAN]]) == 0.5
    assert np.isnan(best_of_many([0.5], [[NAN]]))


def test_instruction_consistency_by_hand():
    rewards = [[[2, 0], [1, 1.5]], [[0, 1], [1, 0]], [[NAN, 0], [1, 1]]]
    # the first pair: 3.5 > 1, and both answers are higher under their own (2 > 1, 1.5 > 0); the second: none is
    assert instruction_consistency(rewards) == {"instructions": 0.5, "responses": 0.5}
    # 1 + 1 > 0 + 1.5; answer 0: 1 > 0, answer 1: 1 < 1.5
    assert instruction_consistency([[[1, 1.5], [0, 1]]]) == {"instructions": 1.0, "responses": 0.5}
    assert np.isnan(instruction_consistency(np.zeros((0, 2, 2)))["instructions"])


def test_diversity_by_hand():
    assert distinct_ngrams([list("aba"), list("ab"), ["a"]], 2) == pytest.approx(2 / 3)  # ab, ba, ab
    assert distinct_ngrams([list("aba")], 1) == pytest.approx(2 / 3) and np.isnan(distinct_ngrams([["a"]], 2))
    assert mean_self_bleu([["a", "b"], ["a", "b"]]) == 1 and mean_self_bleu([["a", "b"], ["c", "d"]]) == 0
    assert np.isnan(mean_self_bleu([["a"]]))
    # cosines 1, 0, 0 of three texts
    assert embedding_distance([[1, 0], [2, 0], [0, 3]]) == pytest.approx(2 / 3)
    assert np.isnan(embedding_distance([[1, 0]]))
    # (0.6, 0.8) and (0.8, 0.6), however short: 1 - 0.96
    assert embedding_distance([[0.03, 0.04], [0.004, 0.003]]) == pytest.approx(0.04)


def test_over_optimization_by_hand():
    found = over_optimization([16, 0, 4, NAN], [3, 1, 2, 9], [0.55, 0.5, 0.6, 9])
    assert (found.peak, found.peak_distance) == (0.6, 2.0) and found.lost == pytest.approx(0.05)
    np.testing.assert_array_equal(found.distance, [0, 2, 4])
    assert found.mismatch == 0.5  # the proxy rises twice, gold rises and falls
    two = over_optimization([0, 1], [1, 2], [0.5, 0.25])
    assert (two.peak, two.peak_distance, two.lost, two.mismatch) == (0.5, 0.0, 0.25, 1.0)
    assert over_optimization([0, 1], [2, 1], [0.5, 0.5]).mismatch == 0  # gold stays where the proxy falls
    with pytest.raises(ValueError, match="k3, which is not negative"):
        over_optimization([-0.1, 1], [0, 1], [0, 1])
    with pytest.raises(ValueError, match="1 checkpoints"):
        over_optimization([1], [0], [0])


def test_training_metrics_by_hand():
    # differences 0.1 and -0.1: 0.01 / 2 each; e^0.1 - 1 - 0.1 and e^-0.1 - 1 + 0.1
    metrics = common_metrics(tokens([0.0, 0.0], [-0.1, 0.1], [1.0, 1.0]))
    np.testing.assert_allclose(metrics["approx_kl_k2"], [0.005, 0.005], rtol=1e-5)
    np.testing.assert_allclose(metrics["approx_kl_k3"].mean(), 0.00500, atol=1e-5)
    assert not metrics["clamped"].any() and "kl_ref_k1" not in metrics
    # The bounds are 0.8 and 1.2: ratios of 0.9 and 1.1 are clipped by no advantage, and any advantage has its sign.
    batch = tokens(np.log([1.3, 0.7, 1.3, 0.7, 0.9, 1.1, 0.7, 1.3]), [0.0] * 8, [1.0, 1, -1, -1, -1, 1, 0.5, -0.5])
    found = clip_metrics(Clipped(clip_low=0.2, clip_high=0.2), batch)
    np.testing.assert_array_equal(found["clip_fraction_high"], [True] + [False] * 7)
    np.testing.assert_array_equal(found["clip_fraction_low"], [False] * 3 + [True] + [False] * 4)


def test_a_kl_to_the_reference_is_weighed_by_what_changed_since_tokens_were_drawn():
    # new - behaviour = log 2: the weight is 2. d = new - reference = 0.5 and -0.5: k1 = d, so that 2 * d = 1 and -1;
    # k3 = exp(-d) - 1 + d = 0.106531 and 0.148721, twice 0.213061 and 0.297443
    batch = tokens([-1.0, -1.0], [-1.2, -1.2], [1.0, 1.0], behaviour=[-1.0 - np.log(2.0)] * 2)
    found = jax.jit(common_metrics)(batch.replace(ref_logprobs=jnp.array([-1.5, -0.5])))
    np.testing.assert_allclose(found["kl_ref_k1"], [1, -1], rtol=1e-6)
    np.testing.assert_allclose(found["kl_ref_k3"], [0.213061, 0.297443], rtol=1e-5)


def test_a_token_is_counted_as_clamped_by_any_of_its_log_ratios():
    # Differences of 21 are above the bound of 20, each in one place: new to old, old to behaviour; the third token has
    # none, and new to behaviour of the fourth is 15 + 15.
    batch = tokens([-1.0, -1, -1, -1], [-22.0, -1, -1, -16], [1.0] * 4, behaviour=[-22.0, -22, -1, -31])
    np.testing.assert_array_equal(common_metrics(batch)["clamped"], [True, True, False, False])
    compared = batch.replace(ref_logprobs=jnp.full(4, -1.0))
    np.testing.assert_array_equal(common_metrics(compared)["clamped"], [True, True, False, True])
    far = batch.replace(ref_logprobs=jnp.full(4, -22.0), behaviour_logprobs=batch.logprobs, old_logprobs=batch.logprobs)
    np.testing.assert_array_equal(common_metrics(far)["clamped"], True)


def test_sampler_mismatch_by_hand():
    mask = jnp.array([True, True, False])
    behaviour, old = jnp.array([-1.0, -2.0, NAN]), jnp.array([-1.1, -1.9, NAN])
    found = jax.jit(sampler_mismatch)(behaviour, old, mask)
    expected = {"k1": 0.0, "k3": 0.005004, "probability": 0.035008, "correlation": 1.0, "chi2": 0.020067,
                "sampler_perplexity": np.exp(1.5), "learner_perplexity": np.exp(1.5)}  # fmt: skip
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    signed = sampler_mismatch(jnp.array([-1.0, -1.0]), jnp.array([-1.5, -1.5]), jnp.array([True, True]))
    np.testing.assert_allclose(signed["k1"], 0.5)  # the sampler's less the learner's
    np.testing.assert_allclose(signed["correlation"], 0)  # nothing varies
    # Probabilities of 1.5e-8 and 5.6e-9 vary, where one less each would be -1 in float32. Two that rise together have a
    # correlation of 1, and of -1 where one falls.
    small = jnp.array([-18.0, -19.0])
    for old, expected in ((small, 1), (small[::-1], -1)):
        found = sampler_mismatch(small, old, jnp.array([True, True]))
        np.testing.assert_allclose(found["correlation"], expected, rtol=1e-5)
    # Of 9e-14 and 3e-14 the product of both sums of squares is 0 in float32: no correlation is told, but a number.
    tiny = jnp.array([-30.0, -31.0])
    np.testing.assert_allclose(sampler_mismatch(tiny, tiny, jnp.array([True, True]))["correlation"], 0, atol=1e-20)


def test_equal_probabilities_have_no_correlation_out_of_rounding():
    # The mean of these equal numbers, summed in float32, is not their value.
    equal = lambda p: jnp.log(jnp.full(777, p))
    mask = jnp.arange(777) < 775
    varying = jnp.linspace(-2.0, -1.0, 777)
    for theirs, ours in ((equal(0.3), equal(0.4)), (equal(0.3), varying), (varying, equal(0.4))):
        assert sampler_mismatch(theirs, ours, mask)["correlation"] == 0
    np.testing.assert_allclose(sampler_mismatch(varying, varying, mask)["correlation"], 1, rtol=1e-5)


def test_no_tokens_have_no_mismatch():
    nothing = jnp.full(2, jnp.nan), jnp.full(2, jnp.nan), jnp.zeros(2, bool)
    found = sampler_mismatch(*nothing)
    assert found["chi2"] == found["k1"] == found["k3"] == 0 and found["sampler_perplexity"] == 1


def test_what_a_step_logs_of_the_mismatch_is_that_of_all_its_tokens():
    # weights e^-0.1 and e^0.1: their mean is 1.005004, that of their squares 1.020067
    mask = jnp.array([True, False, True])
    sampler, old = jnp.array([-1.0, NAN, -2.0]), jnp.array([-1.1, NAN, -1.9])
    terms = jax.jit(mismatch_terms)(sampler, old, mask)
    np.testing.assert_array_equal([values[1] for values in terms.values()], 0)
    # p = e^-1.1 = 0.332871, e^-1.9 = 0.149569; q = 1 - p
    np.testing.assert_allclose(terms["p_learner"], [0.332871, 0, 0.149569], rtol=1e-5)
    np.testing.assert_allclose(terms["q_learner"], [0.667129, 0, 0.850431], rtol=1e-5)
    found = jax.jit(mismatch_of_means)({name: values.sum() / 2 for name, values in terms.items()})
    # Of two tokens that differ the same way the correlation is 1; both mean log-probs are -1.5.
    expected = {"k1": 0.0, "k3": 0.005004, "chi2": 0.020067, "effective_share": 1.005004**2 / 1.020067,
                "correlation": 1.0, "sampler_perplexity": np.exp(1.5), "learner_perplexity": np.exp(1.5)}  # fmt: skip
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    # They are those of the functions that see all tokens at once.
    sampler, old = jnp.linspace(-3, -1, 9), jnp.linspace(-2, -1.5, 9) ** 2 / -2
    found = mismatch_of_means({name: x.mean() for name, x in mismatch_terms(sampler, old, jnp.ones(9, bool)).items()})
    at_once = sampler_mismatch(sampler, old, jnp.ones(9, bool))
    for name in found.keys() & at_once.keys():
        np.testing.assert_allclose(found[name], at_once[name], rtol=1e-5, err_msg=name)
    assert 0.9 < at_once["correlation"] < 0.99
    share = effective_sample_size(jnp.exp(old - sampler), jnp.ones(9, bool))[1]
    np.testing.assert_allclose(found["effective_share"], share, rtol=1e-5)
    nothing = mismatch_of_means({name: 0.0 * x[0] for name, x in mismatch_terms(sampler, old, mask=old < 0).items()})
    assert all(value == name.endswith("perplexity") for name, value in nothing.items())


def test_a_steps_means_of_weights_below_1_and_of_correlations_beyond_1_by_hand():
    # weights 1/2: chi2 = 1/4 - 1, all of the sample counts
    half = mismatch_terms(jnp.zeros(2), jnp.full(2, -jnp.log(2.0)), jnp.ones(2, bool))
    found = mismatch_of_means({name: x.mean() for name, x in half.items()})
    np.testing.assert_allclose([found["chi2"], found["effective_share"]], [-0.75, 1], rtol=1e-6)
    # Both variances are 0.05 - 0.2^2 = 0.01; covariances of 0.06 - 0.04 and 0.02 - 0.04 would be correlations of +-2.
    of_p = {"p_sampler": 0.2, "p_learner": 0.2, "p_sampler_squared": 0.05, "p_learner_squared": 0.05}
    for product, expected in ((0.06, 1), (0.02, -1)):
        means = {**half, **of_p, "p_product": product, "q_sampler_squared": 0.65}
        found = mismatch_of_means({name: jnp.mean(x) for name, x in means.items()})
        assert found["correlation"] == expected


def test_the_largest_difference_of_probabilities_is_of_tokens_that_count():
    # exp(-1) - exp(-1.1) = 0.035008, exp(-1.9) - exp(-2) = 0.014233
    found = jax.jit(probability_difference)(
        jnp.array([-1.0, -2.0, NAN, -9.0]), jnp.array([-1.1, -1.9, NAN, 0.0]), jnp.array([True, True, False, False])
    )
    np.testing.assert_allclose(found, [0.035008, 0.014233, 0, 0], rtol=1e-4)


def test_probabilities_that_differ_by_rounding_have_no_correlation():
    # 0.3 and 0.3 + 1e-5 in turns: a deviation of 5e-6 of 0.7, where float32 has 6e-8 of its mean square.
    near = jnp.log(0.3 + 1e-5 * (jnp.arange(100) % 2))
    of = lambda a, b: mismatch_of_means(
        {name: x.mean() for name, x in mismatch_terms(a, b, jnp.ones(100, bool)).items()}
    )
    varying = jnp.linspace(-2.0, -1.0, 100)
    assert of(near, varying)["correlation"] == of(varying, near)["correlation"] == of(near, near)["correlation"] == 0
    np.testing.assert_allclose(of(varying, varying)["correlation"], 1, rtol=1e-5)
    np.testing.assert_allclose(of(varying, jnp.log1p(-jnp.exp(varying)))["correlation"], -1, rtol=1e-5)


@pytest.mark.parametrize("small", [True, False], ids=["near 0", "near 1"])
def test_the_correlation_of_probabilities_near_0_or_1_is_not_rounding(small):
    """Of a sampler as likely as a random policy over 200 tokens, and of one that is nearly sure, to five digits."""
    rng = np.random.default_rng(0)
    p, r = 0.005 * np.exp(0.3 * rng.normal(size=(2, 200)))
    r = 0.5 * p + 0.5 * r
    p, r = (p, r) if small else (1 - p, 1 - r)
    terms = mismatch_terms(*(jnp.log(jnp.asarray(x, jnp.float32)) for x in (p, r)), jnp.ones(200, bool))
    found = mismatch_of_means({name: x.mean() for name, x in terms.items()})["correlation"]
    np.testing.assert_allclose(found, np.corrcoef(p, r)[0, 1], rtol=2e-4 if not small else 1e-5)


def test_of_several_updates_the_largest_difference_counts():
    update = lambda largest, k1: {"update/tokens": jnp.int32(2), LARGEST: jnp.float32(largest), "k1": jnp.float32(k1)}
    found = mean_metrics([update(0.25, 1), update(0.5, 3), update(0.125, 2)])
    assert found[LARGEST] == 0.5 and found["k1"] == 2


def test_effective_sample_size_by_hand():
    size, share = jax.jit(effective_sample_size)(jnp.array([1.0, 1, 2, NAN]), jnp.array([True] * 3 + [False]))
    np.testing.assert_allclose([size, share], [16 / 6, 16 / 18], rtol=1e-6)
    np.testing.assert_array_equal(effective_sample_size(jnp.zeros(3), jnp.ones(3, bool)), [0, 0])
    # one token of three in the mask: 0.5^2 / 0.5^2 of 1; none: 0
    np.testing.assert_allclose(effective_sample_size(jnp.full(3, 0.5), jnp.array([False, True, False])), [1, 1])
    np.testing.assert_array_equal(effective_sample_size(jnp.full(3, 0.5), jnp.zeros(3, bool)), [0, 0])
