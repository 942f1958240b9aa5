"""Scores of an evaluation, and of repeated runs, with their uncertainty. Host only: numpy, float64.

Samples of one problem are not independent, so every interval of one policy treats the problem (the prompt) as the unit.
Samples that could not be scored are left out by a mask and never count as 0; the caller reports how many there were.
A comparison of runs treats the run (the seed) as the unit, and resamples within each task alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

Array = np.ndarray
Statistic = Callable[[Array], Array]  # [..., scores] -> [...]


class Interval(NamedTuple):
    """A mean, or another statistic in its place, with its confidence interval.

    `n` is the number of problems, or of runs; none give NaN, never 0.
    """

    mean: float
    low: float
    high: float
    n: int


def wilson(successes: float, n: float, *, confidence: float = 0.95) -> tuple[float, float]:
    """Returns the Wilson score interval of a proportion.

        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n),   p = successes / n

    It stays inside [0, 1] and keeps its width at 0 of n and n of n. `n` may be an effective number, not whole.
    Raises ValueError unless 0 <= successes <= n and n > 0.
    """
    if not (n > 0 and 0 <= successes <= n):
        raise ValueError(f"wilson: {successes} successes of {n}")
    z = _quantile(confidence)
    p = successes / n
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    center, scale = p + z * z / (2 * n), 1 + z * z / n
    low = (center - half) / scale if successes > 0 else 0.0  # the ends exactly, not to a rounding
    high = (center + half) / scale if successes < n else 1.0
    return low, high


def proportion_interval(correct: Array, scored: Array | None = None) -> Interval:
    """Returns avg@k of 0/1 outcomes with a 95 % Wilson interval clustered by problem.

    The mean is over problem means. The interval is Wilson's at the effective number of samples
    p (1 - p) / SE^2, SE from the spread of the problem means, held between the number of problems (samples of a
    problem all agree) and the number of samples (they are independent). One sample a problem gives plain Wilson.

    Args:
      correct: [problems, samples] 0 or 1.
      scored: [problems, samples] bool, True where the sample has a verdict. A problem with none is left out.

    Raises ValueError on outcomes that are not 0 or 1. Source: Wilson 1927; effective size as in Kish 1965.
    """
    correct, scored = _rows(correct, scored)
    if not np.isin(correct[scored], (0, 1)).all():
        raise ValueError("proportion_interval: outcomes must be 0 or 1; use bootstrap_interval(problem_means(...))")
    means = problem_means(correct, scored)
    problems, samples = len(means), int(scored.sum())
    if problems == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = float(means.mean())
    effective = float(problems)
    if problems > 1 and 0 < mean < 1:
        variance = float(means.var(ddof=1)) / problems
        effective = samples if variance == 0 else min(max(mean * (1 - mean) / variance, problems), samples)
    return Interval(mean, *wilson(mean * effective, effective), problems)


def bootstrap_interval(
    values: Array, *, confidence: float = 0.95, draws: int = 10_000, seed: int = 0
) -> Interval:  # fmt: skip
    """Returns the mean of one value a problem with a percentile bootstrap interval over problems.

    Args:
      values: [problems] any score: problem means, pass@k, majority@k, a difference.
      draws: resamples.
      seed: of the resampling; the same values and seed give the same interval.

    One problem has no interval: low and high are NaN. Source: 2108.13264, problems in the place of runs.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"bootstrap_interval: expected finite values [problems], got shape {values.shape}")
    n = len(values)
    if n < 2:
        return Interval(float(values[0]) if n else math.nan, math.nan, math.nan, n)
    rng = np.random.default_rng(seed)
    means = np.concatenate([values[rng.integers(n, size=(block, n))].mean(axis=1) for block in _blocks(draws, n)])
    low, high = np.quantile(means, _ends(confidence))
    return Interval(float(values.mean()), float(low), float(high), n)


def share_interval(values: Array, *, confidence: float = 0.95) -> Interval:
    """Returns the mean of one share a problem with a bootstrap interval over problems.

    Where all problems have the same share, or there is only one, resampling shows no spread: 3 wins of 3 would have an
    interval of no width. The interval is then Wilson's.

    Args:
      values: [problems] float in [0, 1]: pass@k, majority@k, wins.
    """
    values = np.asarray(values, np.float64)
    n = len(values)
    if n and values.min() == values.max():
        return Interval(float(values[0]), *wilson(values[0] * n, n, confidence=confidence), n)
    return bootstrap_interval(values, confidence=confidence)


def clustered_bootstrap(
    problems: Sequence[Array], statistic: Statistic, *, confidence: float = 0.95, draws: int = 2000, seed: int = 0
) -> Interval:  # fmt: skip
    """Returns a statistic of all rows of all problems with a percentile interval of the bootstrap over problems (M7):
    the rows of a problem stay together.

    Args:
      problems: one array [rows, ...] for each; those without rows are left out.
      statistic: [rows, ...] -> a number. A draw for which it is NaN, such as an AUROC of right answers alone, does not
        count.

    One problem has no interval: low and high are NaN. Source: 2108.13264, problems in the place of runs.
    """
    problems = [np.asarray(rows) for rows in problems if len(rows)]
    n = len(problems)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    value = float(statistic(np.concatenate(problems)))
    if n < 2 or not math.isfinite(value):
        return Interval(value, math.nan, math.nan, n)
    rng = np.random.default_rng(seed)
    drawn = [statistic(np.concatenate([problems[i] for i in rng.integers(n, size=n)])) for _ in range(draws)]
    low, high = np.nanquantile(drawn, _ends(confidence))
    return Interval(value, float(low), float(high), n)


def problem_means(scores: Array, scored: Array | None = None) -> Array:
    """Returns M2, [problems with a scored sample] float64: each problem's mean over its scored samples."""
    scores, scored = _rows(scores, scored)
    counts = scored.sum(axis=1)
    sums = np.where(scored, scores, 0.0).sum(axis=1)
    return sums[counts > 0] / counts[counts > 0]


def pass_at_k(correct: Array, samples: Array | int, k: int) -> Array:
    """Returns M1, the unbiased chance that one of k samples is correct, for each problem.

        1 - C(n - c, k) / C(n, k) = 1 - prod_{i = n - c + 1 .. n} (1 - k / i),   1 where n - c < k

    Args:
      correct: [problems] int, c, correct samples.
      samples: [problems] int or int, n, scored samples.
      k: at least 1 and at most every n.

    Returns [problems] float64. The product form never overflows. Raises ValueError on n < k or c outside 0..n.
    Source: 2107.03374, equation 1.
    """
    correct = np.asarray(correct, np.int64)
    samples = np.broadcast_to(np.asarray(samples, np.int64), correct.shape)
    if k < 1 or (samples < k).any():
        raise ValueError(f"pass_at_k: k = {k} needs at least so many samples of each problem; fewest {samples.min()}")
    if ((correct < 0) | (correct > samples)).any():
        raise ValueError("pass_at_k: correct samples must be between 0 and the number of samples")
    return np.array([_pass_at_k(int(c), int(n), k) for c, n in zip(correct, samples)], np.float64)


def expected_best_of_k(rewards: Array, k: int) -> float:
    """Returns M4, the expected largest of k of one problem's rewards, sum_i C(i - 1, k - 1) / C(n, k) r_(i).

    Args:
      rewards: [samples] float, those that were scored. k: at least 1 and at most their number.
    """
    ordered = np.sort(np.asarray(rewards, np.float64))
    n = len(ordered)
    if not 1 <= k <= n:
        raise ValueError(f"expected_best_of_k: k = {k} of {n} scored samples")
    return float(sum(math.comb(i - 1, k - 1) / math.comb(n, k) * r for i, r in enumerate(ordered.tolist(), start=1)))


def all_of_k(correct: Array, samples: Array | int, k: int) -> Array:
    """Returns M5, pass^k: the chance that all of k samples are correct, C(c, k) / C(n, k), [problems] float64; 0 where
    c < k. Arguments as in `pass_at_k`."""
    correct = np.asarray(correct, np.int64)
    samples = np.broadcast_to(np.asarray(samples, np.int64), correct.shape)
    return 1 - pass_at_k(samples - correct, samples, k)


def self_correction(first: Array, second: Array) -> dict[str, float]:
    """Returns M19, {"first", "second": accuracy, "gained": the second less the first, "corrected", "broken": shares of
    all problems that turned right, and wrong}; NaN of no problems.

    Args:
      first, second: [problems] float, 1 where the attempt is right, 0 where wrong; a second one that is missing (NaN)
        counts as wrong, and a problem without a verdict on the first is left out.

    Source: SCoRe, Kumar et al. 2409.12917 section 3.
    """
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if first.shape != second.shape or first.ndim != 1:
        raise ValueError(f"self_correction: attempts [problems], got {first.shape} and {second.shape}")
    judged = np.isfinite(first)
    before, after = first[judged] > 0.5, second[judged] > 0.5  # NaN is not above
    share = lambda x: float(np.mean(x)) if len(x) else float("nan")
    return {
        "first": share(before),
        "second": share(after),
        "gained": share(after) - share(before),
        "corrected": share(~before & after),
        "broken": share(before & ~after),
    }


def best_of_n(rewards: Array, scored: Array | None = None) -> Array:
    """Returns S3, the index of each problem's best sample, [problems] int64: the first that has the largest reward; -1
    where none was scored.

    Args:
      rewards: [problems, samples] float; may be NaN where not scored. scored: same shape, bool; all by default.
    """
    rewards, scored = _rows(rewards, scored)
    best = np.where(scored, rewards, -np.inf).argmax(axis=1)
    return np.where(scored.any(axis=1), best, -1)


def best_of_n_kl(n: int) -> float:
    """Returns S3's bound on the KL of the best of n samples to the policy that draws them, log n - (n - 1) / n nats.

    Source: Stiennon et al. 2009.01325, appendix. It is reached where no two rewards are equal.
    """
    if n < 1:
        raise ValueError(f"best_of_n_kl: n = {n}; it is a number of samples, at least 1")
    return math.log(n) - (n - 1) / n


def majority(answers: Sequence[str | None], weights: Sequence[float] | None = None) -> str | None:
    """Returns S4, the answer with the most votes, or None where there are no votes.

    Args:
      answers: the answer of each sample; None is unreadable and does not vote. Equal answers are equal text: merge
        what the verifier calls equal first.
      weights: the weight of each vote, 1 by default.

    A tie goes to the answer seen first. Source: 2203.11171 (self-consistency).
    """
    if weights is not None and len(weights) != len(answers):
        raise ValueError(f"majority: {len(answers)} answers, {len(weights)} weights")
    votes: dict[str, float] = {}
    for answer, weight in zip(answers, weights if weights is not None else itertools.repeat(1.0)):
        if answer is not None:
            votes[answer] = votes.get(answer, 0.0) + weight
    return max(votes, key=votes.__getitem__) if votes else None


def majority_at_k(
    answers: Sequence[str | None], correct: Sequence[bool], k: int, *, draws: int = 1000, seed: int = 0
) -> float:  # fmt: skip
    """Returns M3, how often the majority of k samples of one problem is correct.

    The mean over all subsets of k in their own order, or over `draws` random ones where there are more than that.

    Args:
      answers: [samples] as for `majority`.
      correct: [samples] whether that sample's answer is correct; the winning answer's first sample decides.

    A subset without a readable answer counts as wrong. Raises ValueError unless 1 <= k <= samples.
    """
    n = len(answers)
    if len(correct) != n or not 1 <= k <= n:
        raise ValueError(f"majority_at_k: k = {k} of {n} answers, {len(correct)} outcomes")
    numbers: dict[str | None, int] = {None: 0}
    number_of = np.array([numbers.setdefault(answer, len(numbers)) for answer in answers])
    outcome: dict[int, bool] = {0: False}
    for number, right in zip(number_of.tolist(), correct):
        outcome.setdefault(number, bool(right))
    chosen = number_of[_subsets(n, k, draws, seed)]  # [subsets, k]
    cells = len(numbers) * np.arange(len(chosen))[:, None] + chosen
    votes = np.bincount(cells.ravel(), minlength=len(numbers) * len(chosen)).reshape(len(chosen), len(numbers))
    votes[:, 0] = 0
    first = np.take_along_axis(votes, chosen, axis=1).argmax(axis=1)  # of the samples whose answers have most votes
    wins = np.array([outcome[number] for number in range(len(numbers))])[chosen[np.arange(len(chosen)), first]]
    return int(wins.sum()) / len(wins)


@functools.lru_cache(maxsize=64)
def _subsets(n: int, k: int, draws: int, seed: int) -> Array:
    """Returns subsets of k of n samples in their own order, [subsets, k]: all, or `draws` random ones of more."""
    if math.comb(n, k) <= draws:
        return np.array(list(itertools.combinations(range(n), k)))
    rng = np.random.default_rng(seed)
    return np.stack([np.sort(rng.permutation(n)[:k]) for _ in range(draws)])


def mean(scores: Array) -> Array:
    """Returns the mean over the last axis, [..., scores] -> [...]; NaN where there are no scores."""
    scores = np.asarray(scores, np.float64)
    return scores.mean(axis=-1) if scores.shape[-1] else np.full(scores.shape[:-1], math.nan)


def interquartile_mean(scores: Array) -> Array:
    """Returns M6, the mean of the middle half, [..., scores] -> [...]; NaN where there are no scores.

        mean of s_(c + 1) .. s_(n - c),   c = floor(n / 4)

    All runs of all tasks are one flat list. Fewer than 4 scores are not cut. Source: 2108.13264, section 4.3.
    """
    scores = np.sort(np.asarray(scores, np.float64), axis=-1)
    cut = scores.shape[-1] // 4
    return mean(scores[..., cut : scores.shape[-1] - cut])


def stratified_bootstrap(
    tasks: Sequence[Array], statistic: Statistic = mean, *, confidence: float = 0.95, draws: int = 10_000, seed: int = 0
) -> Interval:  # fmt: skip
    """Returns M7, a statistic of all scores with a percentile interval of the bootstrap stratified by task.

    Each draw resamples the runs of each task among themselves, joins the tasks, and takes the statistic.

    Args:
      tasks: one array [runs] for each task; they may differ in length.
      statistic: [..., scores] -> [...], such as `interquartile_mean`.

    A task of one run shows nothing of the spread over runs: low and high are NaN.
    Source: 2108.13264, section 4.2; it draws 50,000 times.
    """
    scores = [_scores(task, "stratified_bootstrap") for task in tasks]
    joined = np.concatenate([*scores, np.zeros(0)])
    value = float(statistic(joined))
    if not scores or min(map(len, scores)) < 2:
        return Interval(value, math.nan, math.nan, len(joined))
    rng = np.random.default_rng(seed)
    drawn = [
        statistic(np.concatenate([task[rng.integers(len(task), size=(block, len(task)))] for task in scores], axis=1))
        for block in _blocks(draws, len(joined))
    ]
    low, high = np.quantile(np.concatenate(drawn), _ends(confidence))
    return Interval(value, float(low), float(high), len(joined))


def performance_profile(scores: Array, thresholds: Array) -> Array:
    """Returns M8, the share of scores above each threshold: [scores], [thresholds] -> [thresholds].

    Scores of several tasks must be on one scale. NaN where there are no scores. Source: 2108.13264, section 4.3.
    """
    scores = _scores(scores, "performance_profile")
    return mean(scores > np.asarray(thresholds, np.float64)[:, None])


def probability_of_improvement(
    tasks: Sequence[Array], baseline: Sequence[Array], *, confidence: float = 0.95, draws: int = 10_000, seed: int = 0
) -> Interval:  # fmt: skip
    """Returns M9, the chance that a run scores higher than a run of the baseline, with an interval as in M7.

        mean over tasks of  mean over pairs of runs of  1[x > y] + 1/2 1[x = y]

    Args:
      tasks: one array [runs] for each task. baseline: likewise, the same tasks in the same order.

    It says how often, not by how much. Runs of both sides are resampled within each task; with one run on a side, low
    and high are NaN. `n` counts the runs that are compared with the baseline.
    Raises ValueError where the tasks do not match. Source: 2108.13264, section 4.3 (Mann and Whitney's U / n m).
    """
    xs = [_scores(task, "probability_of_improvement") for task in tasks]
    ys = [_scores(task, "probability_of_improvement") for task in baseline]
    if len(xs) != len(ys):
        raise ValueError(f"probability_of_improvement: {len(xs)} tasks against {len(ys)} of the baseline")
    count = sum(map(len, xs))
    if not xs or min(map(len, [*xs, *ys])) == 0:
        return Interval(math.nan, math.nan, math.nan, count)
    wins = [pairwise_wins(x, y) for x, y in zip(xs, ys)]
    value = float(np.mean([win.mean() for win in wins]))
    if min(map(len, [*xs, *ys])) < 2:
        return Interval(value, math.nan, math.nan, count)
    rng = np.random.default_rng(seed)
    share = lambda n, block: rng.multinomial(n, np.full(n, 1 / n), size=block) / n  # how often each run is drawn
    drawn = [
        np.mean(
            [np.einsum("dx,xy,dy->d", share(len(win), block), win, share(win.shape[1], block)) for win in wins], axis=0
        )
        for block in _blocks(draws, max(len(win) + win.shape[1] for win in wins))
    ]
    low, high = np.quantile(np.concatenate(drawn), _ends(confidence))
    return Interval(value, float(low), float(high), count)


def pairwise_wins(x: Array, y: Array) -> Array:
    """Returns for every two of [n] and [m] scores whether the first is higher, a tie half, [n, m] float64."""
    return (x[:, None] > y) + 0.5 * (x[:, None] == y)


def optimality_gap(scores: Array, gamma: float) -> Array:
    """Returns M10, how far scores fall short of a target: gamma - mean of min(score, gamma), [..., scores] -> [...].

    What exceeds the target does not count. Lower is better. Source: 2108.13264, section 4.3.
    """
    return gamma - mean(np.minimum(np.asarray(scores, np.float64), gamma))


def _pass_at_k(c: int, n: int, k: int) -> float:
    return 1.0 if n - c < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def _blocks(draws: int, n: int) -> list[int]:
    """How many of the draws are made at once, n numbers each: bounds the memory, whatever n."""
    at_once = max(1, 1_000_000 // max(n, 1))
    return [min(at_once, draws - start) for start in range(0, draws, at_once)]


def _ends(confidence: float) -> tuple[float, float]:
    """The quantiles between which a percentile interval lies."""
    return (1 - confidence) / 2, (1 + confidence) / 2


def _scores(values: Array, function: str) -> Array:
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"{function}: expected finite scores [runs], got {values}")
    return values


def _quantile(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, not {confidence}")
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _rows(scores: Array, scored: Array | None) -> tuple[Array, Array]:
    scores = np.asarray(scores, np.float64)
    scored = np.ones(scores.shape, bool) if scored is None else np.asarray(scored, bool)
    if scores.ndim != 2 or scores.shape != scored.shape:
        raise ValueError(f"expected scores and mask [problems, samples], got {scores.shape} and {scored.shape}")
    return scores, scored
