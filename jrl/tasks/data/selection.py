"""Selection of prompts by their outcomes so far: pure functions on a table of prompts. Host only, numpy.

The host chooses the prompts, so it also holds the table. Ties go to the lowest index (E11).
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray

UNSEEN = 0.5  # success rate of a prompt that was never judged


def in_band(rate: Array, seen: Array, *, low: float, high: float) -> Array:
    """Returns F2: True for prompts whose success rate is within [low, high], and for those never judged, [P] bool.

    Args:
      rate: [P] float, ignored where not seen. seen: [P] bool.

    Source: SimpleRL-Zoo, DeepMath, Big-Math. open-instruct drops only solved prompts; Kimi uses the rate of ten
    samples.
    """
    return ~seen | ((rate >= low) & (rate <= high))


def sampling_weights(rate: Array, seen: Array, *, exponent: float, floor: float) -> Array:
    """Returns F9: weights of prompts, [P] float64 that sum to 1: proportional to (1 - rate)^exponent + floor.

    A prompt never judged counts as having rate 0.5. The floor keeps solved prompts in, so that forgetting is noticed.
    If every weight would be 0, they are equal.

    Args:
      rate: [P] float, ignored where not seen. seen: [P] bool.

    Source: Kimi k1.5, 2501.12599 section 2.3.3 (its exponent is 1, and it has no floor).
    """
    missed = 1 - np.clip(np.where(seen, rate, UNSEEN).astype(np.float64), 0, 1)
    weight = missed**exponent + floor
    total = weight.sum()
    return weight / total if total > 0 else np.full(len(weight), 1 / max(len(weight), 1))


def hardest(rate: Array, *, share: float) -> Array:
    """Returns F6: True for the share of prompts with the lowest success rates, rounded down, at least one, [P] bool.

    This includes prompts that were never solved, which need a larger budget of samples. `cap_unsolved` bounds their
    number in a batch.

    Args:
      rate: [P] float.

    Source: DRIVE, 2511.06307 (the schedule of shares is not in its abstract).
    """
    count = max(1, int(share * len(rate) + 1e-9))  # 0.29 * 100 is 28.999999999999996
    keep = np.zeros(len(rate), bool)
    keep[np.argsort(rate, kind="stable")[:count]] = True
    return keep


def cap_unsolved(rate: Array, *, most: int) -> Array:
    """Returns F6's cap: True for the prompts of a batch with a success, and for the first `most` without, [B] bool."""
    never = rate <= 0
    return ~never | (np.cumsum(never) <= most)


def learning_impact(rates: Array, mean: Array) -> Array:
    """Returns F4: how closely each prompt's success over epochs follows the mean prompt's, [P] float64, at most 1.

        s_i = 1 - sum_k (r_ik - mean_k)^2 / sum_k (1 - mean_k)^2

    Prompts above a threshold are selected (0.2 in the released script, with 21 epochs; 0.6 in the paper). If the mean
    is 1 in every epoch, the score is undefined and all are -inf.

    Args:
      rates: [P, E] float, mean reward of a prompt in an epoch, without gaps (`fill_epochs`). mean: [E], over prompts.

    Source: LIMR, 2502.11886 section 2.1.
    """
    below = np.sum((1 - mean) ** 2)
    if below == 0:
        return np.full(len(rates), -np.inf)
    return 1 - np.sum((rates - mean[None, :]) ** 2, axis=1) / below


def fill_epochs(rates: Array, *, fewest: int) -> tuple[Array, Array]:
    """Returns F4's input: (rates without gaps [P, E], [P] bool: seen in at least `fewest` epochs, and in at least one).

    A missing epoch, NaN, is filled with the next known one, or with the last known one if there is no next. A prompt
    never seen gets 0 in every epoch.

    Source: the released script of LIMR.
    """
    known = np.isfinite(rates)
    filled = np.where(known, rates, np.nan)
    for k in range(rates.shape[1] - 2, -1, -1):
        filled[:, k] = np.where(np.isfinite(filled[:, k]), filled[:, k], filled[:, k + 1])
    for k in range(1, rates.shape[1]):
        filled[:, k] = np.where(np.isfinite(filled[:, k]), filled[:, k], filled[:, k - 1])
    return np.nan_to_num(filled, nan=0.0), known.sum(axis=1) >= max(fewest, 1)


def most_varied(rates: Array, *, count: int) -> Array:
    """Returns F14: the `count` prompts with the highest variance of the success rate over checkpoints, [count] int64,
    the highest first.

    The variance is over the known checkpoints (NaN: unknown), divided by their number; 0 for fewer than two. It is
    rounded to 12 decimals, so that prompts with the same rates in another order tie.

    Args:
      rates: [P, K] float, in [0, 1].

    Source: 1-shot RLVR, 2504.20571 section 2.
    """
    rates, known = rates.astype(np.float64), np.isfinite(rates)
    number = np.maximum(known.sum(axis=1), 1)
    mean = np.where(known, rates, 0).sum(axis=1) / number
    variance = np.where(known, (rates - mean[:, None]) ** 2, 0).sum(axis=1) / number
    return np.argsort(-np.round(variance, 12), kind="stable")[:count]
