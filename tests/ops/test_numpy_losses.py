"""Each policy loss and selection against a plain loop over tokens in NumPy, on random packed rows.

The loops are written from the formulas of docs/algorithms.md alone and share nothing with jrl.ops: Python floats, one
token after another. Every case has sequences of several lengths, padding, masked tokens that hold NaN, ratios on both
sides of every bound, and advantages of both signs and 0.
"""

from __future__ import annotations

from math import ceil, exp, floor, log

import jax
import numpy as np
import pytest

from jrl.ops import (
    awr,
    covariance,
    decoupled,
    gates,
    geometric_mean,
    importance,
    likelihood,
    mirror_descent,
    mix_policy,
    offline_advantage,
    rejection_sampling,
    sequence_ratio,
    surrogate,
    token_selection,
    trust_region,
    two_hot,
)

CASES, LENGTH, PLACES = 200, 14, 3


def cases():
    """Returns arrays [CASES, LENGTH]: three sequences of random lengths in a row, then padding (place 3)."""
    rng = np.random.default_rng(11)
    shape = (CASES, LENGTH)
    ends = np.sort(rng.integers(1, LENGTH + 1, (CASES, PLACES)), axis=1)
    segment = (np.arange(LENGTH)[None, :, None] >= ends[:, None, :]).sum(-1).astype(np.int32)
    mask = (rng.uniform(size=shape) < 0.75) & (segment < PLACES)
    lp = rng.uniform(-2.5, -0.05, shape)
    per_row = rng.normal(size=(CASES, PLACES + 1)) * (rng.uniform(size=(CASES, PLACES + 1)) < 0.85)
    found = {
        "lp": lp,
        "old": lp + rng.normal(0, 0.3, shape),
        "beh": lp + rng.normal(0, 0.5, shape),
        "ref": lp + rng.normal(0, 0.4, shape),
        "A": rng.normal(size=shape) * (rng.uniform(size=shape) < 0.85),
        "rowA": np.take_along_axis(per_row, segment, axis=1),
        "H": rng.uniform(0, 3, shape),
    }
    found = {name: np.where(mask, x, np.nan).astype(np.float32) for name, x in found.items()}
    found["correct"] = rng.uniform(size=shape) < 0.5
    found["noise"] = rng.permuted(np.tile(np.arange(LENGTH, dtype=np.uint32) * 1000, (CASES, 1)), axis=1)
    return {**found, "mask": mask, "segment": segment}


DATA = cases()


def places(case):
    """Returns the tokens in the loss of each sequence: lists of columns."""
    return [[t for t in range(LENGTH) if case["mask"][t] and case["segment"][t] == i] for i in range(PLACES)]


def tokens(case):
    return [t for t in range(LENGTH) if case["mask"][t]]


def clip(x, low, high):
    return min(max(x, low), high)


# Loops: (case, out) fill the losses of the tokens in the mask


def l5(c, out):
    for row in places(c):
        if row:
            s = exp(sum(c["lp"][t] - c["old"][t] for t in row) / len(row))
            for t in row:
                out[t] = -min(s * c["rowA"][t], clip(s, 1 - 0.1, 1 + 0.15) * c["rowA"][t])


def l6(c, out):
    for row in places(c):
        if row:
            s = exp(sum(c["lp"][t] - c["old"][t] for t in row) / len(row))
            for t in row:
                out[t] = -min(s * c["A"][t], clip(s, 1 - 0.1, 1 + 0.15) * c["A"][t])


def l7(c, out):
    for row in places(c):
        rho = exp(clip(sum(c["lp"][t] - c["old"][t] for t in row), -20, 20))
        for t in row:
            out[t] = -min(rho * c["rowA"][t], clip(rho, 1 - 0.2, 1 + 0.25) * c["rowA"][t])


def l8(c, out):
    for t in tokens(c):
        out[t] = -min(exp(c["lp"][t] - c["old"][t]), 1.2) * c["A"][t] * c["lp"][t]


def l10_token(c, out):
    for t in tokens(c):
        out[t] = 0.8 <= exp(c["old"][t] - c["beh"][t]) <= 1.3


def l10_product(c, out):
    for row in places(c):
        w = exp(sum(c["old"][t] - c["beh"][t] for t in row))
        for t in row:
            out[t] = 0.5 <= w <= 2.0


def l10_geometric(c, out):
    for row in places(c):
        if row:
            w = exp(sum(c["old"][t] - c["beh"][t] for t in row) / len(row))
            for t in row:
                out[t] = 0.8 <= w <= 1.3


def l10_every(c, out):
    for row in places(c):
        inside = [0.5 <= exp(c["old"][t] - c["beh"][t]) <= 2.0 for t in row]
        for t in row:
            out[t] = all(inside)


def l10_opsm(c, out):
    for row in places(c):
        if row:
            drift = sum(c["beh"][t] - c["lp"][t] for t in row) / len(row)
            for t in row:
                out[t] = not (c["rowA"][t] < 0 and drift > 0.1)


def l11(c, out):
    for t in tokens(c):
        w = min(exp(c["old"][t] - c["beh"][t]), 1.5)
        rho, a = exp(c["lp"][t] - c["old"][t]), c["A"][t]
        out[t] = -w * min(rho * a, clip(rho, 1 - 0.2, 1 + 0.28) * a)


def l12(c, out):
    for t in tokens(c):
        rho, centre, a = exp(c["lp"][t] - c["beh"][t]), exp(c["old"][t] - c["beh"][t]), c["A"][t]
        out[t] = -min(rho * a, clip(rho, centre - 0.2, centre + 0.2) * a)


def l13(c, out):
    for row in places(c):
        total, before = sum(c["lp"][t] for t in row), sum(c["old"][t] for t in row)
        for t in row:
            out[t] = -c["rowA"][t] * total + 0.5 / 2 * (total - before) ** 2


def l13_mean(c, out):
    for row in places(c):
        if row:
            mean, before = sum(c["lp"][t] for t in row) / len(row), sum(c["old"][t] for t in row) / len(row)
            for t in row:
                out[t] = -c["rowA"][t] * mean + 0.5 / 2 * (mean - before) ** 2


def l15(c, out):
    for row in places(c):
        ratio = clip(exp(clip(sum(c["lp"][t] - c["ref"][t] for t in row), -20, 20)), 1 - 0.9, 1 + 0.9)
        for t in row:
            out[t] = -max(c["rowA"][t], 0) * ratio * c["lp"][t]


def l15_token(c, out):
    for t in tokens(c):
        out[t] = -max(c["rowA"][t], 0) * clip(exp(c["lp"][t] - c["ref"][t]), 0.1, 1.9) * c["lp"][t]


def l15_ref_free(c, out):
    for t in tokens(c):
        out[t] = -max(c["rowA"][t], 0) * c["lp"][t]


def l15_kl(c, out):
    for t in tokens(c):
        out[t] = -max(c["rowA"][t], 0) * c["lp"][t] + 0.3 * (c["lp"][t] - c["ref"][t])


def l15_gold(c, out):
    for t in tokens(c):
        out[t] = -max(c["rowA"][t], 0) * max(exp(c["lp"][t]), 0.1) * c["lp"][t]


def l16(c, out):
    for t in tokens(c):
        out[t] = -min(exp(c["A"][t] / 0.5), 3.0) * c["lp"][t]


def l17(c, out):
    for t in tokens(c):
        out[t] = -c["lp"][t] if c["correct"][t] else 0


def l18(c, out):
    for t in tokens(c):
        tau = 1.0 if c["A"][t] > 0 else 1.05
        rho = exp(c["lp"][t] - c["old"][t])
        out[t] = -(4 / tau) / (1 + exp(-tau * (rho - 1))) * c["A"][t]


def l19(c, out):
    for row in places(c):
        held = []
        for t in row:
            d = c["lp"][t] - c["old"][t]
            if c["rowA"][t] > 0:
                d = min(d, 0.25)
            if c["rowA"][t] < 0:
                d = max(d, -0.2)
            held.append(d)
        for t in row:
            out[t] = -exp(sum(held) / len(held)) * c["rowA"][t]


def cov(c):
    every = tokens(c)
    mean_a, mean_lp = (sum(c[name][t] for t in every) / max(len(every), 1) for name in ("A", "lp"))
    return {t: (c["A"][t] - mean_a) * (c["lp"][t] - mean_lp) for t in every}


def l20_cov(c, out):
    for t, value in cov(c).items():
        out[t] = value


def l20_clip_cov(c, out):
    inside = [t for t, value in cov(c).items() if -0.2 < value < 0.5]
    inside.sort(key=lambda t: -int(c["noise"][t]))
    for t in inside[: floor(0.3 * len(tokens(c)) + 1e-6)]:
        out[t] = True


def l20_kl_cov(c, out):
    values = cov(c)
    if len({float(c["A"][t]) for t in values}) > 1:
        for t in sorted(values, key=lambda t: -values[t])[: floor(0.3 * len(values) + 1e-6)]:
            out[t] = True


def l20_kl_cov_loss(c, out):
    for t in tokens(c):
        d = c["lp"][t] - c["old"][t]
        out[t] = -exp(d) * c["A"][t] + (0.7 * abs(d) if c["correct"][t] else 0)


def l21(c, out):
    for t in tokens(c):
        q = exp(c["lp"][t]) - exp(c["beh"][t])
        if not ((c["A"][t] > 0 and q > 0.1) or (c["A"][t] < 0 and q < -0.1)):
            out[t] = -exp(c["lp"][t] - c["beh"][t]) * c["A"][t] * c["lp"][t]


def l22(c, out):
    squares = sorted(((c["lp"][t] - c["beh"][t]) ** 2, t) for t in tokens(c))
    while squares and sum(s for s, _ in squares) / len(squares) > 0.1:
        squares.pop()
    for _, t in squares:
        out[t] = True


def l23(c, out):
    every = tokens(c)
    if every:
        threshold = np.quantile([float(c["H"][t]) for t in every], 1 - 0.35)
        for t in every:
            out[t] = c["H"][t] >= threshold - 1e-7


PLACED = {"num_segments": PLACES}
PACKED = ("mask", "segment")

LOSSES = {
    "L5": (l5, sequence_ratio.gspo, ("lp", "old", "rowA", *PACKED), PLACED | {"clip_low": 0.1, "clip_high": 0.15}),
    "L6": (l6, sequence_ratio.gspo_token, ("lp", "old", "A", *PACKED), PLACED | {"clip_low": 0.1, "clip_high": 0.15}),
    "L7": (
        l7,
        sequence_ratio.sequence_clipped,
        ("lp", "old", "rowA", *PACKED),
        PLACED | {"clip_low": 0.2, "clip_high": 0.25},
    ),
    "L8": (l8, surrogate.cispo, ("lp", "old", "A", "mask"), {"max_weight": 1.2}),
    "L10 token": (l10_token, importance.accepted, ("old", "beh", "mask"), {"low": 0.8, "high": 1.3}),
    "L10 product": (
        l10_product,
        importance.accepted_by_sequence,
        ("old", "beh", *PACKED),
        PLACED | {"low": 0.5, "high": 2.0},
    ),
    "L10 geometric": (
        l10_geometric,
        importance.accepted_by_geometric_mean,
        ("old", "beh", *PACKED),
        PLACED | {"low": 0.8, "high": 1.3},
    ),
    "L10 every token": (
        l10_every,
        importance.accepted_by_every_token,
        ("old", "beh", *PACKED),
        PLACED | {"low": 0.5, "high": 2.0},
    ),
    "L10 OPSM": (
        l10_opsm,
        importance.near_policy,
        ("lp", "beh", "rowA", *PACKED),
        PLACED | {"delta": 0.1},
    ),
    "L11": (
        l11,
        decoupled.decoupled_clipped,
        ("lp", "old", "beh", "A", "mask"),
        {"clip_low": 0.2, "clip_high": 0.28, "cap": 1.5},
    ),
    "L12": (l12, mix_policy.mix_policy_clipped, ("lp", "old", "beh", "A", "mask"), {"clip": 0.2}),
    "L13": (l13, mirror_descent.mirror_descent, ("lp", "old", "rowA", *PACKED), PLACED | {"tau": 0.5}),
    "L13 mean": (l13_mean, mirror_descent.mean_mirror_descent, ("lp", "old", "rowA", *PACKED), PLACED | {"tau": 0.5}),
    "L15": (l15, offline_advantage.a_lol, ("lp", "ref", "rowA", *PACKED), PLACED | {"clip": 0.9}),
    "L15 token": (l15_token, offline_advantage.a_lol_token, ("lp", "ref", "rowA", "mask"), {"clip": 0.9}),
    "L15 reference-free": (l15_ref_free, offline_advantage.a_lol_ref_free, ("lp", "rowA", "mask"), {}),
    "L15 KL": (l15_kl, offline_advantage.a_lol_kl, ("lp", "ref", "rowA", "mask"), {"coefficient": 0.3}),
    "L15 R-GOLD": (l15_gold, offline_advantage.r_gold, ("lp", "rowA", "mask"), {"floor": 0.1}),
    "L16": (l16, awr.awr, ("lp", "A", "mask"), {"beta": 0.5, "max_weight": 3.0}),
    "L17": (l17, likelihood.positive_nll, ("lp", "correct", "mask"), {}),
    "L18": (
        l18,
        gates.soft_gated,
        ("lp", "old", "A", "mask"),
        {"positive_temperature": 1.0, "negative_temperature": 1.05},
    ),
    "L19": (
        l19,
        geometric_mean.gmpo,
        ("lp", "old", "rowA", *PACKED),
        PLACED | {"log_clip_low": 0.2, "log_clip_high": 0.25},
    ),
    "L20 cov": (l20_cov, covariance.covariance, ("lp", "A", "mask"), {}),
    "L20 Clip-Cov": (
        l20_clip_cov,
        covariance.clip_cov,
        ("lp", "A", "mask", "noise"),
        {"share": 0.3, "low": -0.2, "high": 0.5},
    ),
    "L20 KL-Cov": (l20_kl_cov, covariance.kl_cov, ("lp", "A", "mask"), {"share": 0.3}),
    "L20 KL-Cov loss": (
        l20_kl_cov_loss,
        covariance.kl_cov_loss,
        ("lp", "old", "A", "correct", "mask"),
        {"coefficient": 0.7},
    ),
    "L21": (l21, trust_region.dppo, ("lp", "beh", "A", "mask"), {"delta": 0.1}),
    "L22": (l22, trust_region.within_second_moment, ("lp", "beh", "mask"), {"limit": 0.1}),
    "L23": (l23, token_selection.high_entropy, ("H", "mask"), {"share": 0.35}),
}


def by_loop(loop):
    out = np.zeros((CASES, LENGTH))
    for i in range(CASES):
        case = {
            name: value[i].astype(np.float64) if value.dtype == np.float32 else value[i] for name, value in DATA.items()
        }
        loop(case, out[i])
    return out


@pytest.mark.parametrize("name", LOSSES)
def test_it_equals_a_loop_over_tokens(name):
    loop, function, inputs, options = LOSSES[name]
    arrays = [DATA[key] for key in inputs]
    got = jax.jit(jax.vmap(lambda *rows: function(*rows, **options)))(*arrays)
    expected = by_loop(loop)
    assert got.shape == expected.shape
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_the_cases_reach_both_sides_of_its_bounds(name):
    expected = by_loop(LOSSES[name][0])[DATA["mask"]]
    if set(np.unique(expected)) <= {0.0, 1.0}:
        assert 0.05 < expected.mean() < 0.95
    else:
        assert np.ptp(expected) > 0.5


def groups():
    rng = np.random.default_rng(3)
    reward = rng.integers(0, 4, (CASES, 12)) / 4
    return (
        reward.astype(np.float32),
        rng.integers(0, 3, (CASES, 12)).astype(np.int32),
        rng.uniform(size=(CASES, 12)) < 0.8,
    )


def test_best_of_group_equals_a_loop_over_rows():
    reward, group, valid = groups()
    expected = np.zeros((CASES, 12))
    for n in range(CASES):
        for g in range(3):
            rows = [i for i in range(12) if valid[n, i] and group[n, i] == g]
            best = [i for i in rows if reward[n, i] == max(reward[n, j] for j in rows)]
            if len(best) < len(rows):
                for i in best:
                    expected[n, i] = 1 / len(best)
    got = jax.vmap(lambda *arrays: rejection_sampling.best_of_group(*arrays, num_groups=3))(reward, group, valid)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_rows_above_a_threshold_equal_a_loop_over_rows():
    reward, group, valid = groups()
    expected = np.zeros((CASES, 12))
    for n in range(CASES):
        for g in range(3):
            rows = [i for i in range(12) if valid[n, i] and group[n, i] == g and reward[n, i] >= 0.5]
            for i in rows:
                expected[n, i] = min(1, 2 / len(rows))
    fn = lambda *arrays: rejection_sampling.above_threshold(*arrays, num_groups=3, threshold=0.5, max_kept=2.0)
    np.testing.assert_allclose(jax.vmap(fn)(reward, group, valid), expected, rtol=1e-5, atol=1e-5)


def test_two_hot_equals_a_loop_over_bins():
    rng = np.random.default_rng(4)
    bins = np.linspace(-3, 3, 7)
    target, logits = rng.normal(0, 8, (CASES, 4)), rng.normal(size=(CASES, 4, 7))
    mask = rng.uniform(size=(CASES, 4)) < 0.8
    loss, weights = np.zeros((CASES, 4)), np.zeros((CASES, 4, 7))
    for n in range(CASES):
        for t in range(4):
            x = clip(np.sign(target[n, t]) * log(1 + abs(target[n, t])), -3, 3)
            j = min(ceil(x + 3), 6) - 1 if x > -3 else 0
            weights[n, t, j] = bins[j + 1] - x
            weights[n, t, j + 1] = x - bins[j]
            log_z = log(sum(exp(z) for z in logits[n, t]))
            if mask[n, t]:
                loss[n, t] = -sum(w * (z - log_z) for w, z in zip(weights[n, t], logits[n, t], strict=True))
    given = np.where(mask, target, np.nan).astype(np.float32)
    got = jax.jit(jax.vmap(lambda *a: two_hot.two_hot_loss(*a, bins=bins.astype(np.float32))))(
        logits.astype(np.float32), given, mask
    )
    np.testing.assert_allclose(got, loss, rtol=1e-5, atol=1e-5)
