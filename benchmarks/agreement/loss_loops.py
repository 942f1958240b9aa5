"""Losses, KL terms and values (sections L, K and V) as loops over tokens, in plain Python floats, with derivatives.

Written from docs/algorithms.md and the parts' names and inputs, before their functions were read; see
`advantage_loops.py`. A loss returns its value at every token and, taken by hand from the formula, the derivative of the
sum of all of them by the log-prob (or value, or logit) at each place: a stop-gradient is a part of the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

Array = np.ndarray
Losses = tuple[Array, Array]  # the values, their sum's derivatives

LARGEST_LOG_RATIO = 20.0


def clamped(x: float) -> float:
    return min(max(x, -LARGEST_LOG_RATIO), LARGEST_LOG_RATIO)


def ratio(new: float, old: float) -> tuple[float, float]:
    """Returns exp of the clamped difference, and its derivative by `new`."""
    value = math.exp(clamped(float(new) - float(old)))
    return value, value if abs(float(new) - float(old)) <= LARGEST_LOG_RATIO else 0.0


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def by_token(mask: Array, at: Callable[..., tuple[float, float]], *arrays: Array, masked: float = 0.0) -> Losses:
    """Returns what `at` gives for the entries of every token of the mask, and `masked` elsewhere."""
    values, slopes = np.full(mask.shape, masked), np.zeros(mask.shape)
    for place in np.ndindex(mask.shape):
        if mask[place]:
            values[place], slopes[place] = at(*(float(array[place]) for array in arrays))
    return values, slopes


def by_sequence(
    mask: Array,
    segment: Array,
    at: Callable[[list], list[tuple[float, float]]],
    *arrays: Array,
    masked: float = 0.0,
) -> Losses:
    """Returns what `at` gives for a sequence's tokens, given as a list of tuples of entries; `masked` elsewhere."""
    values, slopes = np.full(mask.shape, masked), np.zeros(mask.shape)
    for row in range(len(mask)):
        for name in set(segment[row].tolist()):
            places = [(row, t) for t in range(mask.shape[1]) if mask[row, t] and segment[row, t] == name]
            if places:
                given = [tuple(float(array[place]) for array in arrays) for place in places]
                for place, (value, slope) in zip(places, at(given)):
                    values[place], slopes[place] = value, slope
    return values, slopes


def minimum(rho: float, slope: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """Returns -min(rho A, clip(rho, low, high) A) and its derivative; on a bound the one that is not clipped."""
    plain, bounded = rho * advantage, clip(rho, low, high) * advantage
    return (-plain, -slope * advantage) if plain <= bounded else (-bounded, 0.0)


def policy_gradient(logprobs, advantages, mask):
    return by_token(mask, lambda lp, a: (-a * lp, -a), logprobs, advantages)


def clipped(logprobs, old_logprobs, advantages, mask, clip_low, clip_high):
    def at(lp, old, a):
        return minimum(*ratio(lp, old), a, 1 - clip_low, 1 + clip_high)

    return by_token(mask, at, logprobs, old_logprobs, advantages)


def dual_clipped(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip):
    def at(lp, old, a):
        loss, slope = minimum(*ratio(lp, old), a, 1 - clip_low, 1 + clip_high)
        return (-dual_clip * a, 0.0) if a < 0 and loss > -dual_clip * a else (loss, slope)

    return by_token(mask, at, logprobs, old_logprobs, advantages)


def capped(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, delta):
    def at(lp, old, a):
        rho, slope = ratio(lp, old)
        first, second = min(rho, delta) * a, clip(rho, 1 - clip_low, 1 + clip_high) * a
        if first <= second:
            return -first, -slope * a if rho <= delta else 0.0
        return -second, 0.0

    return by_token(mask, at, logprobs, old_logprobs, advantages)


def mean_difference(tokens: list) -> float:
    return sum(token[0] - token[1] for token in tokens) / len(tokens)


def sum_difference(tokens: list) -> float:
    return sum(token[0] - token[1] for token in tokens)


def gspo(logprobs, old_logprobs, advantages, mask, segment, num_segments, clip_low, clip_high):
    # Each of n tokens holds the loss, and each moves the mean by 1 / n: n times 1 / n.
    def at(tokens):
        s, slope = ratio(mean_difference(tokens), 0)
        return [minimum(s, slope, a, 1 - clip_low, 1 + clip_high) for _, _, a in tokens]

    return by_sequence(mask, segment, at, logprobs, old_logprobs, advantages)


def mean_ratio(logprobs, old_logprobs, mask, segment, num_segments):
    def at(tokens):
        return [ratio(mean_difference(tokens), 0)] * len(tokens)

    return by_sequence(mask, segment, at, logprobs, old_logprobs, masked=1.0)


def gspo_token(logprobs, old_logprobs, advantages, mask, segment, num_segments, clip_low, clip_high):
    def at(tokens):
        s, _ = ratio(mean_difference(tokens), 0)
        return [minimum(s, s, a, 1 - clip_low, 1 + clip_high) for _, _, a in tokens]

    return by_sequence(mask, segment, at, logprobs, old_logprobs, advantages)


def sequence_clipped(logprobs, old_logprobs, advantages, mask, segment, num_segments, clip_low, clip_high):
    # Each of n tokens holds the loss of the sequence, and each moves the sum by 1: n times.
    def at(tokens):
        s, slope = ratio(sum_difference(tokens), 0)
        losses = [minimum(s, slope, a, 1 - clip_low, 1 + clip_high) for _, _, a in tokens]
        return [(loss, len(tokens) * slope) for loss, slope in losses]

    return by_sequence(mask, segment, at, logprobs, old_logprobs, advantages)


def cispo(logprobs, old_logprobs, advantages, mask, max_weight):
    def at(lp, old, a):
        weight = min(ratio(lp, old)[0], max_weight)
        return -weight * a * lp, -weight * a

    return by_token(mask, at, logprobs, old_logprobs, advantages)


def token_weights(old_logprobs, behaviour_logprobs, mask, cap):
    def at(old, beh):
        return min(ratio(old, beh)[0], cap), 0.0

    return by_token(mask, at, old_logprobs, behaviour_logprobs, masked=1.0)[0]


def sequence_weights(old_logprobs, behaviour_logprobs, mask, segment, num_segments, cap):
    def at(tokens):
        return [(min(ratio(sum_difference(tokens), 0)[0], cap), 0.0)] * len(tokens)

    return by_sequence(mask, segment, at, old_logprobs, behaviour_logprobs, masked=1.0)[0]


def geometric_weights(old_logprobs, behaviour_logprobs, mask, segment, num_segments, cap):
    def at(tokens):
        return [(min(ratio(mean_difference(tokens), 0)[0], cap), 0.0)] * len(tokens)

    return by_sequence(mask, segment, at, old_logprobs, behaviour_logprobs, masked=1.0)[0]


def accepted(old_logprobs, behaviour_logprobs, mask, low, high):
    def at(old, beh):
        return low <= ratio(old, beh)[0] <= high, 0.0

    return by_token(mask, at, old_logprobs, behaviour_logprobs)[0].astype(bool)


def accepted_by_sequence(old_logprobs, behaviour_logprobs, mask, segment, num_segments, low, high):
    def at(tokens):
        return [(low <= ratio(sum_difference(tokens), 0)[0] <= high, 0.0)] * len(tokens)

    return by_sequence(mask, segment, at, old_logprobs, behaviour_logprobs)[0].astype(bool)


def accepted_by_geometric_mean(old_logprobs, behaviour_logprobs, mask, segment, num_segments, low, high):
    def at(tokens):
        return [(low <= ratio(mean_difference(tokens), 0)[0] <= high, 0.0)] * len(tokens)

    return by_sequence(mask, segment, at, old_logprobs, behaviour_logprobs)[0].astype(bool)


def accepted_by_every_token(old_logprobs, behaviour_logprobs, mask, segment, num_segments, low, high):
    def at(tokens):
        return [(all(low <= ratio(old, beh)[0] <= high for old, beh in tokens), 0.0)] * len(tokens)

    return by_sequence(mask, segment, at, old_logprobs, behaviour_logprobs)[0].astype(bool)


def near_policy(logprobs, behaviour_logprobs, advantages, mask, segment, num_segments, delta):
    def at(tokens):
        far = -mean_difference(tokens) > delta
        return [(not (a < 0 and far), 0.0) for _, _, a in tokens]

    return by_sequence(mask, segment, at, logprobs, behaviour_logprobs, advantages)[0].astype(bool)


def decoupled_clipped(logprobs, old_logprobs, behaviour_logprobs, advantages, mask, clip_low, clip_high, cap):
    def at(lp, old, beh, a):
        weight = min(ratio(old, beh)[0], cap)
        loss, slope = minimum(*ratio(lp, old), a, 1 - clip_low, 1 + clip_high)
        return weight * loss, weight * slope

    return by_token(mask, at, logprobs, old_logprobs, behaviour_logprobs, advantages)


def interpolated_logprobs(logprobs, behaviour_logprobs, mask, behaviour_version, old_version, version):
    def at(lp, beh, drawn):
        if drawn == float(version):
            return lp, 0.0  # of the weights that learn
        alpha = (float(old_version) - drawn) / (float(version) - drawn)
        return beh + alpha * (lp - beh), 0.0

    return by_token(mask, at, logprobs, behaviour_logprobs, behaviour_version)[0]


def mix_policy_clipped(logprobs, old_logprobs, sampled_logprobs, advantages, mask, clip):
    def at(lp, old, sampled, a):
        center = ratio(old, sampled)[0]
        return minimum(*ratio(lp, sampled), a, center - clip, center + clip)

    return by_token(mask, at, logprobs, old_logprobs, sampled_logprobs, advantages)


def mirror_descent(logprobs, old_logprobs, advantages, mask, segment, num_segments, tau):
    def at(tokens):
        total, moved = sum(token[0] for token in tokens), sum_difference(tokens)
        return [(-a * total + tau / 2 * moved**2, len(tokens) * (-a + tau * moved)) for _, _, a in tokens]

    return by_sequence(mask, segment, at, logprobs, old_logprobs, advantages)


def mean_mirror_descent(logprobs, old_logprobs, advantages, mask, segment, num_segments, tau):
    def at(tokens):
        average, moved = sum(token[0] for token in tokens) / len(tokens), mean_difference(tokens)
        return [(-a * average + tau / 2 * moved**2, -a + tau * moved) for _, _, a in tokens]

    return by_sequence(mask, segment, at, logprobs, old_logprobs, advantages)


def best_of_group(reward, group, sample, valid, num_groups):
    out = np.zeros(len(reward))
    for g in range(num_groups):
        rows = sorted((i for i in range(len(reward)) if group[i] == g and valid[i]), key=lambda i: sample[i])
        rewards = [float(reward[i]) for i in rows]
        if rewards and min(rewards) < max(rewards):
            out[rows[rewards.index(max(rewards))]] = 1
    return out


def above_threshold(reward, group, sample, valid, tokens, action_mask, num_groups, threshold, max_kept):
    out = np.zeros(len(reward))
    for g in range(num_groups):
        good = [i for i in range(len(reward)) if group[i] == g and valid[i] and reward[i] >= threshold]
        answers = []
        for i in sorted(good, key=lambda i: sample[i]):
            end = max((column + 1 for column, sampled in enumerate(action_mask[i]) if sampled), default=0)
            answer = [int(token) for token in tokens[i][:end]]
            if len(answers) < max_kept and answer not in answers:
                answers.append(answer)
                out[i] = 1
    return out


def weighted(lp: float, a: float, weight: float) -> tuple[float, float]:
    """Returns -a weight lp with a constant weight; nothing where a is not above 0."""
    return (-a * weight * lp, -a * weight) if a > 0 else (0.0, 0.0)


def a_lol(logprobs, ref_logprobs, advantages, mask, segment, num_segments, clip):
    bounds = (1 - clip, 1 + clip)

    def at(tokens):
        weight = min(max(ratio(sum_difference(tokens), 0)[0], bounds[0]), bounds[1])
        return [weighted(lp, a, weight) for lp, _, a in tokens]

    return by_sequence(mask, segment, at, logprobs, ref_logprobs, advantages)


def a_lol_token(logprobs, ref_logprobs, advantages, mask, clip):
    def at(lp, ref, a):
        return weighted(lp, a, min(max(ratio(lp, ref)[0], 1 - clip), 1 + clip))

    return by_token(mask, at, logprobs, ref_logprobs, advantages)


def a_lol_ref_free(logprobs, advantages, mask):
    return by_token(mask, lambda lp, a: weighted(lp, a, 1.0), logprobs, advantages)


def a_lol_kl(logprobs, ref_logprobs, advantages, mask, coefficient):
    def at(lp, ref, a):
        return (-a * lp + coefficient * (lp - ref), -a + coefficient) if a > 0 else (0.0, 0.0)

    return by_token(mask, at, logprobs, ref_logprobs, advantages)


def r_gold(logprobs, advantages, mask, floor):
    return by_token(mask, lambda lp, a: weighted(lp, a, max(math.exp(lp), floor)), logprobs, advantages)


def awr_weights(advantages, beta, max_weight):
    weights = [min(math.exp(min(float(a) / beta, 700.0)), max_weight) for a in advantages.ravel()]
    return np.array(weights).reshape(advantages.shape)


def awr(logprobs, advantages, mask, beta, max_weight):
    def at(lp, a):
        weight = min(math.exp(min(a / beta, 700.0)), max_weight)
        return -weight * lp, -weight

    return by_token(mask, at, logprobs, advantages)


def positive_nll(logprobs, correct, mask):
    return by_token(mask & correct, lambda lp: (-lp, -1.0), logprobs)


def pretraining_nll(logprobs, mask, coefficient, num_tokens, denominator):
    scale = float(coefficient) * float(denominator) / float(num_tokens)
    return by_token(mask, lambda lp: (-scale * lp, -scale), logprobs)


def positive_weights(correct, loss_mask):
    right = [(i, t) for i, t in np.ndindex(loss_mask.shape) if loss_mask[i, t] and correct[i]]
    out = np.zeros(loss_mask.shape)
    for place in right:
        out[place] = sum(bool(counts) for counts in loss_mask.ravel()) / len(right)
    return out


def soft_gated(logprobs, old_logprobs, advantages, mask, positive_temperature, negative_temperature):
    def at(lp, old, a):
        rho, slope = ratio(lp, old)
        tau = positive_temperature if a > 0 else negative_temperature
        gate = 1 / (1 + math.exp(-min(tau * (rho - 1), 700.0)))
        return -4 / tau * gate * a, -4 * gate * (1 - gate) * slope * a

    return by_token(mask, at, logprobs, old_logprobs, advantages)


def gmpo(logprobs, old_logprobs, advantages, mask, segment, num_segments, log_clip_low, log_clip_high):
    def at(tokens):
        a = tokens[0][2]
        moved = [lp - old for lp, old, _ in tokens]
        bound = [min(d, log_clip_high) if a > 0 else max(d, -log_clip_low) if a < 0 else d for d in moved]
        s, slope = ratio(sum(bound) / len(bound), 0)
        return [(-s * a, -slope * a if d == b else 0.0) for d, b in zip(moved, bound)]

    return by_sequence(mask, segment, at, logprobs, old_logprobs, advantages)


def covariance(logprobs, advantages, mask):
    count = max(sum(bool(counts) for counts in mask.ravel()), 1)
    mean_lp, mean_a = (
        sum(float(x[place]) for place in np.ndindex(mask.shape) if mask[place]) / count for x in (logprobs, advantages)
    )
    return by_token(mask, lambda lp, a: ((a - mean_a) * (lp - mean_lp), 0.0), logprobs, advantages)[0]


def of_all(mask: Array, share: float) -> int:
    """Returns how many tokens a share of the masked ones is, rounded down."""
    return math.floor(share * sum(bool(counts) for counts in mask.ravel()) + 1e-6)


def clip_cov(logprobs, advantages, mask, noise, share, low, high):
    cov = covariance(logprobs, advantages, mask)
    candidates = [place for place in np.ndindex(mask.shape) if mask[place] and low < cov[place] < high]
    out = np.zeros(mask.shape, bool)
    for place in sorted(candidates, key=lambda place: -int(noise[place]))[: of_all(mask, share)]:
        out[place] = True
    return out


def kl_cov(logprobs, advantages, mask, share):
    cov = covariance(logprobs, advantages, mask)
    tokens = [place for place in np.ndindex(mask.shape) if mask[place]]
    out = np.zeros(mask.shape, bool)
    if len({float(advantages[place]) for place in tokens}) > 1:
        largest = sorted((cov[place] for place in tokens), reverse=True)[: of_all(mask, share)]
        for place in tokens:
            out[place] = bool(largest) and cov[place] >= largest[-1]  # all that tie with the last
    return out


def kl_cov_loss(logprobs, old_logprobs, advantages, selected, mask, coefficient):
    def at(lp, old, a, picked):
        rho, slope = ratio(lp, old)
        sign = (lp > old) - (lp < old)
        return -rho * a + picked * coefficient * abs(lp - old), -slope * a + picked * coefficient * sign

    return by_token(mask, at, logprobs, old_logprobs, advantages, selected)


def far_apart(lp: float, beh: float, a: float, delta: float) -> bool:
    moved = math.exp(lp) - math.exp(beh)
    return (a > 0 and moved > delta) or (a < 0 and moved < -delta)


def dppo(logprobs, behaviour_logprobs, advantages, mask, delta):
    def at(lp, beh, a):
        if far_apart(lp, beh, a, delta):
            return 0.0, 0.0
        return -ratio(lp, beh)[0] * a * lp, -ratio(lp, beh)[0] * a

    return by_token(mask, at, logprobs, behaviour_logprobs, advantages)


def within_probability(logprobs, behaviour_logprobs, advantages, mask, delta):
    def at(lp, beh, a):
        return not far_apart(lp, beh, a, delta), 0.0

    return by_token(mask, at, logprobs, behaviour_logprobs, advantages)[0].astype(bool)


def within_second_moment(logprobs, behaviour_logprobs, mask, limit):
    squares = {
        place: (float(logprobs[place]) - float(behaviour_logprobs[place])) ** 2
        for place in np.ndindex(mask.shape)
        if mask[place]
    }
    rest = sorted(squares, key=squares.__getitem__)
    while rest and sum(squares[place] for place in rest) / len(rest) > limit:
        rest = [place for place in rest if squares[place] < squares[rest[-1]]]  # equal squares leave together
    out = np.zeros(mask.shape, bool)
    for place in rest:
        out[place] = True
    return out


def high_entropy(entropy, mask, share):
    values = sorted(float(entropy[place]) for place in np.ndindex(mask.shape) if mask[place])
    out = np.zeros(mask.shape, bool)
    if values:
        place_of = (1 - float(share)) * (len(values) - 1)
        below, above = math.floor(place_of), math.ceil(place_of)
        quantile = values[below] + (place_of - below) * (values[above] - values[below])
        for place in np.ndindex(mask.shape):
            out[place] = mask[place] and float(entropy[place]) >= quantile
    return out


def k1(logprobs, ref_logprobs, mask):
    return by_token(mask, lambda lp, ref: (lp - ref, 1.0), logprobs, ref_logprobs)


def k2(logprobs, ref_logprobs, mask):
    return by_token(mask, lambda lp, ref: ((lp - ref) ** 2 / 2, lp - ref), logprobs, ref_logprobs)


def third(lp: float, ref: float) -> tuple[float, float]:
    back, slope = ratio(ref, lp)
    return back - 1 + clamped(lp - ref), 1 - back if slope else 0.0


def k3(logprobs, ref_logprobs, mask):
    return by_token(mask, third, logprobs, ref_logprobs)


def corrected_k3(logprobs, old_logprobs, ref_logprobs, mask):
    def at(lp, old, ref):
        (rho, slope), (kl, kl_slope) = ratio(lp, old), third(lp, ref)
        return rho * kl, slope * kl + rho * kl_slope

    return by_token(mask, at, logprobs, old_logprobs, ref_logprobs)


def straight_through_k3(logprobs, ref_logprobs, mask):
    return by_token(mask, lambda lp, ref: (third(lp, ref)[0], lp - ref), logprobs, ref_logprobs)


def adapted_kl_coefficient(coefficient, kl, rows, target, horizon):
    return coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * rows / horizon)


def entropy_bonus(entropy, mask, coefficient):
    return by_token(mask, lambda h: (-coefficient * h, 0.0), entropy)[0]


def adapted_entropy_coefficient(coefficient, entropy, target, step, largest):
    return clip(coefficient + step if entropy < target else coefficient - step, 0.0, largest)


def averaged_reference(reference, params, decay):
    return np.array([decay * float(a) + (1 - decay) * float(b) for a, b in zip(reference, params)])


def reference_share(step: int) -> float:
    return max(1 - 0.1 * math.ceil(max(step - 50, 0) / 10), 0.5)


def base_share(step):
    return reference_share(int(step))


def mixed_kl(kl_base, kl_previous, step):
    share = reference_share(int(step))
    return np.array([share * float(a) + (1 - share) * float(b) for a, b in zip(kl_base, kl_previous)])


def reset_due(step, every):
    return int(step) > 0 and int(step) % int(every) == 0


def clipped_value_loss(values, old_values, returns, mask, clip):
    binds = np.zeros(mask.shape, bool)
    losses, slopes = np.zeros(mask.shape), np.zeros(mask.shape)
    for place in np.ndindex(mask.shape):
        if mask[place]:
            v, old, target = (float(x[place]) for x in (values, old_values, returns))
            near = old + min(max(v - old, -clip), clip)
            plain, bounded = (v - target) ** 2, (near - target) ** 2
            binds[place] = bounded > plain
            losses[place] = 0.5 * max(plain, bounded)
            slopes[place] = 0.0 if binds[place] else v - target
    return (losses, binds), slopes


def symlog(x):
    return np.array([math.copysign(math.log(1 + abs(float(y))), y) for y in x])


def symexp(x):
    return np.array([math.copysign(math.exp(abs(float(y))) - 1, y) for y in x])


def weights_of_bins(x: float, bins: Array) -> list[float]:
    x = min(max(x, float(bins[0])), float(bins[-1]))
    out = [0.0] * len(bins)
    for j in range(len(bins) - 1):
        low, high = float(bins[j]), float(bins[j + 1])
        if low <= x <= high:
            out[j], out[j + 1] = (high - x) / (high - low), (x - low) / (high - low)
            break
    return out


def bins_of(count, limit):
    return np.array([-float(limit) + 2 * float(limit) * j / (count - 1) for j in range(count)])


def two_hot(x, bins):
    return np.array([weights_of_bins(float(y), bins) for y in x])


def softmax(logits: Array) -> list[float]:
    top = max(float(z) for z in logits)
    powers = [math.exp(float(z) - top) for z in logits]
    return [power / sum(powers) for power in powers]


def two_hot_loss(logits, returns, mask, bins):
    losses, slopes = np.zeros(mask.shape), np.zeros(logits.shape)
    for place in np.ndindex(mask.shape):
        if mask[place]:
            target = weights_of_bins(float(symlog([returns[place]])[0]), bins)
            probability = softmax(logits[place])
            losses[place] = -sum(w * math.log(p) for w, p in zip(target, probability))
            slopes[place] = [p - w for w, p in zip(target, probability)]
    return losses, slopes


def two_hot_value(logits, bins):
    means = [sum(p * float(b) for p, b in zip(softmax(logits[i]), bins)) for i in range(len(logits))]
    return symexp(means)


def out_of_range(returns, mask, bins):
    out = np.zeros(mask.shape, bool)
    for place in np.ndindex(mask.shape):
        if mask[place]:
            out[place] = not float(bins[0]) <= float(symlog([returns[place]])[0]) <= float(bins[-1])
    return out


def explained_variance(values, returns, mask):
    pairs = [(float(returns[place]), float(values[place])) for place in np.ndindex(mask.shape) if mask[place]]
    if len({target for target, _ in pairs}) < 2:
        return math.nan

    def variance(numbers):
        center = sum(numbers) / len(numbers)
        return sum((x - center) ** 2 for x in numbers) / len(numbers)

    errors = [target - value for target, value in pairs]
    return 1 - variance(errors) / (variance([target for target, _ in pairs]) + 1e-5)
