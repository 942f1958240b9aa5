"""Objectives of stored pairs by hand: one number each on the running example, masks, gradients, what is refused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.contract import Facts, Sequences
from jrl.algos.paired import gains, preferred_of
from jrl.learning.learner import ModelOutputs, micro_batch, sequence_terms
from jrl.ops import pair_losses
from jrl.types import PackedBatch, Recomputed, SequenceTargets, TrainBatch

FACTS = Facts(samples=1, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=8)


def sequences(logprob, ref_logprob, length, label=None, mask=None, log_sum_squared=None, common_gain=None):
    """A row of pairs."""
    row = lambda x: jnp.asarray([x], jnp.float32)
    places = len(logprob)
    return Sequences(
        logprob=row(logprob),
        ref_logprob=row(ref_logprob),
        length=jnp.asarray([length], jnp.int32),
        score=None,
        label=row([1.0, 0.0] * (places // 2) if label is None else label),
        unit=jnp.asarray([np.arange(places) // 2], jnp.int32),
        mask=jnp.ones((1, places), bool) if mask is None else jnp.asarray([mask]),
        log_sum_squared=None if log_sum_squared is None else row(log_sum_squared),
        common_gain=None if common_gain is None else row(common_gain),
    )


# u_w = -10 + 11 = 1, u_l = -12 + 11 = -1, D = 2; means over tokens -1 and -1
RUNNING = sequences([-10.0, -12.0], [-11.0, -11.0], [10, 12])
# means -0.5 and -1
MEANS = sequences([-5.0, -12.0], [-6.0, -11.0], [10, 12])
# the same, and -0.3 and -0.2 of what is drawn there: -0.2 and -0.8 of that
ALIGNED = sequences([-5.0, -12.0], [-6.0, -11.0], [10, 12], log_sum_squared=[-3.0, -2.4])
# u_w = 0.5, u_l = -1.5, D = 2
CALIBRATED = sequences([-10.0, -12.0], [-10.5, -10.5], [10, 12])
# of u_w = 1 and u_l = -1, 0.5 and -0.3 in the first 10 tokens of both
COMMON = sequences([-10.0, -12.0], [-11.0, -11.0], [10, 12], common_gain=[0.5, -0.3])
DPO = 0.598139  # -log sigmoid(0.1 * 2)

# name -> (fields that differ from the defaults, pairs, loss)
BY_HAND = {
    "ConservativeDPO": ({}, RUNNING, 0.618139),  # 0.9 * 0.598139 + 0.1 * 0.798139
    "RobustDPO": ({}, RUNNING, 0.573139),  # (0.9 * 0.598139 - 0.1 * 0.798139) / 0.8
    "IPO": ({}, RUNNING, 9.0),  # (2 - 1 / 0.2)^2
    "HingeDPO": ({}, RUNNING, 0.8),  # 1 - 0.2
    "ORPO": ({}, MEANS, 0.532031),  # 0.5 + 0.1 * log(1 + e^-0.974077)
    "SimPO": ({}, MEANS, 0.693147),  # log(1 + e^(1 - 2 * 0.5))
    "CPO": ({"weight": 0.5}, MEANS, 0.653186),  # log(1 + e^(-0.1 * 7)) + 0.5 * 0.5 = 0.403186 + 0.25
    "LengthNormalizedDPO": ({}, RUNNING, 0.336365),  # log(1 + e^(-5 (0.1 + 1 / 12)))
    "FDPO": ({}, RUNNING, 0.594349),  # log(1 + e^(-0.1 * 2.084381))
    "EXO": ({}, RUNNING, 2.422010),
    "NCA": ({}, RUNNING, 1.338793),
    "SPPO": ({}, RUNNING, 32.0),
    "APOZero": ({}, RUNNING, 0.950042),
    "APODown": ({}, RUNNING, 0.975146),
    "BCO": ({}, RUNNING, 1.288793),
    "WPO": ({}, ALIGNED, 0.367879 * DPO),  # e^(-0.2 - 0.8)
    "RPO": ({}, RUNNING, DPO + 1.0),
    "VPO": ({}, RUNNING, DPO - 0.01),  # 0.1 * 0.1 * 1
    "LDDPO": ({}, COMMON, 0.625595),  # log(1 + e^(-0.1 * (0.75 + 0.65)))
    "CPL": ({}, RUNNING, 0.913015),  # log(1 + e^(0.1 (0.5 * -12 + 10)))
}


def as_read(name, pairs):
    """Returns the pairs as the learner gives them: without a reference where the objective asks for none."""
    needs = ALGOS[name].needs(ALGOS[name].config())
    return pairs if needs.reference else dataclasses.replace(pairs, ref_logprob=None)


def loss_of(name, fields, pairs):
    row, pairs = ALGOS[name], as_read(name, pairs)
    return jax.jit(row.sequence_loss)(row.config(**fields), pairs, row.init_state(row.config()))


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    fields, pairs, value = BY_HAND[name]
    loss, metrics = loss_of(name, fields, pairs)
    np.testing.assert_allclose(loss, [[value, 0]], 2e-6)
    reference = ALGOS[name].needs(ALGOS[name].config()).reference
    margin = 2.0 if reference else float(pairs.logprob[0, 0] - pairs.logprob[0, 1])
    np.testing.assert_allclose(metrics["pairs/margin"], [[margin, 0]], 1e-6)
    np.testing.assert_array_equal(metrics["pairs/accuracy"], [[1, 0]])
    nll = -float(pairs.logprob[0, 0]) / float(pairs.length[0, 0])  # a mean over the preferred answer's tokens
    np.testing.assert_allclose(metrics["pairs/nll"], [[nll, 0]], 1e-6)


@pytest.mark.parametrize("name", BY_HAND)
def test_neither_order_nor_a_masked_pair_is_seen(name):
    fields, pairs, value = BY_HAND[name]
    nan = np.nan
    places = lambda x: [nan, x[0, 1], nan, x[0, 0]]
    mask = [False, True, False, True]
    squared, common = (None if x is None else places(x) for x in (pairs.log_sum_squared, pairs.common_gain))
    given = places(pairs.logprob), places(pairs.ref_logprob), [0, 12, 7, 10], [1, 0, 0, 1], mask
    mixed = sequences(*given, squared, common)
    mixed = as_read(name, dataclasses.replace(mixed, unit=jnp.asarray([[1, 0, 1, 0]], jnp.int32)))
    row = ALGOS[name]
    state = row.init_state(row.config())
    total = lambda lp: row.sequence_loss(row.config(**fields), dataclasses.replace(mixed, logprob=lp), state)[0].sum()
    found, gradient = jax.jit(jax.value_and_grad(total))(mixed.logprob)
    np.testing.assert_allclose(found, value, 2e-6)
    np.testing.assert_array_equal(gradient[0, [0, 2]], 0)
    # Every loss raises the preferred answer against the other one: along (1, -1) it falls.
    assert np.isfinite(gradient).all() and gradient[0, 3] - gradient[0, 1] < 0


@pytest.mark.parametrize("name", BY_HAND)
def test_the_gradient_is_that_of_small_differences(name):
    fields, pairs, _ = BY_HAND[name]
    row, pairs = ALGOS[name], as_read(name, pairs)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64) if x.dtype == jnp.float32 else x, pairs)
        state = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), row.init_state(row.config()))
        at = lambda lp: row.sequence_loss(row.config(**fields), dataclasses.replace(wide, logprob=lp), state)[0].sum()
        total = at
        if name == "WPO":  # the weight is held: its own change is not the loss's
            held, sign = np.exp(-1.0), jnp.array([[1.0, -1.0]])
            total = lambda lp: held * jax.nn.softplus(-0.1 * ((lp - wide.ref_logprob) * sign).sum())
        step = 1e-5 * jnp.eye(2)[:, None]
        expected = [(total(wide.logprob + d) - total(wide.logprob - d)) / 2e-5 for d in step]
        np.testing.assert_allclose(jax.grad(at)(wide.logprob)[0], expected, 1e-6, 1e-9)


def test_which_sequence_of_a_pair_is_preferred_by_hand():
    # In turn: the first, the second by a soft label; a tie, an empty answer on either side, one that is masked, and one
    # alone are no pairs.
    label = [1.0, 0.0, 0.2, 0.8, 0.5, 0.5, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    length = [1, 1, 3, 2, 1, 1, 0, 4, 4, 0, 2, 2, 5]
    mask = np.ones(13, bool)
    mask[10] = False
    places = [float("nan") if not there else -1.0 for there in mask]
    given = sequences(places, places, length, label, mask)
    expected = np.zeros((1, 13), bool)
    expected[0, [0, 3]] = True
    np.testing.assert_array_equal(jax.jit(preferred_of)(given), expected)


def test_gains_by_hand():
    # -10 + 11, -12 + 11, and nothing of a sequence that is masked; without a reference the log-probs themselves.
    mask = [True, True, False, False]
    given = sequences([-10.0, -12.0, np.nan, np.nan], [-11.0, -11.0, np.nan, -1.0], [1] * 4, mask=mask)
    np.testing.assert_array_equal(jax.jit(gains)(given), [[1, -1, 0, 0]])
    alone = dataclasses.replace(given, ref_logprob=None)
    np.testing.assert_array_equal(jax.jit(gains)(alone), [[-10, -12, 0, 0]])
    slope = jax.grad(lambda x: gains(dataclasses.replace(given, logprob=x)).sum())(given.logprob)
    np.testing.assert_array_equal(slope, [[1, 1, 0, 0]])


def test_what_is_logged_of_a_pair_by_hand():
    # u_w = -10 + 11, u_l = -12 + 11, D = 2; where D = 0 half of a pair is in order, where it is below 0 none.
    cases = [((-10.0, -12.0), 1.0, 1.0, -1.0), ((-10.0, -10.0), 0.5, 1.0, 1.0), ((-12.0, -10.0), 0.0, -1.0, 1.0)]
    for logprobs, accuracy, preferred, other in cases:
        found = loss_of("IPO", {}, sequences(list(logprobs), [-11.0, -11.0], [10, 12]))[1]
        logged = {"accuracy": accuracy, "margin": preferred - other, "preferred": preferred, "other": other}
        logged["nll"] = -logprobs[0] / 10
        for name, value in logged.items():
            np.testing.assert_allclose(found[f"pairs/{name}"], [[value, 0]], atol=1e-6, err_msg=name)


def test_gains_count_times_beta():
    # u_w = 2, u_l = -2, at half the beta
    doubled = sequences([-9.0, -13.0], [-11.0, -11.0], [10, 12])
    for name in ("EXO", "NCA", "APOZero", "APODown", "BCO", "VPO"):
        row = ALGOS[name]
        found = row.sequence_loss(row.config(beta=0.05), doubled, row.init_state(row.config()))[0]
        np.testing.assert_allclose(found, [[BY_HAND[name][2], 0]], 2e-6, err_msg=name)


def test_the_reverse_kl_of_fdpo_and_certain_labels_of_conservative_dpo_are_dpo():
    expected = loss_of("DPO", {}, RUNNING)[0]
    np.testing.assert_allclose(loss_of("FDPO", {"alpha": 1.0}, RUNNING)[0], expected, 1e-6)
    np.testing.assert_allclose(loss_of("ConservativeDPO", {"noise": 0.0}, RUNNING)[0], expected, 1e-6)
    # phi of Jensen and Shannon: log sigmoid(1) - log sigmoid(-1) = 1; log(1 + e^-0.1)
    found = loss_of("FDPO", {"divergence": "jensen_shannon"}, RUNNING)[0]
    np.testing.assert_allclose(found, [[0.644397, 0]], 1e-6)


def test_a_label_between_is_the_strength_of_a_preference():
    # -(0.8 log sigmoid(0.2) + 0.2 log sigmoid(-0.2))
    strong = dataclasses.replace(RUNNING, label=jnp.float32([[0.8, 0.2]]))
    np.testing.assert_allclose(loss_of("ConservativeDPO", {"noise": 0.0}, strong)[0], [[0.638139, 0]], 1e-6)
    # With a tenth of labels turned round 0.8 * 0.9 + 0.2 * 0.1 = 0.74: 0.74 * 0.598139 + 0.26 * 0.798139
    np.testing.assert_allclose(loss_of("ConservativeDPO", {"noise": 0.1}, strong)[0], [[0.650139, 0]], 1e-6)


def test_vpo_is_optimistic_or_pessimistic_by_the_sign_of_its_weight():
    # P21's numbers, of u_cal = 0.5, weight 1 and beta 0.1: DPO + 0.05 on-line and DPO - 0.05 offline
    np.testing.assert_allclose(pair_losses.vpo(jnp.float32(0.2), jnp.float32(0.05), 1.0), 0.64814, 1e-5)
    np.testing.assert_allclose(pair_losses.vpo(jnp.float32(0.2), jnp.float32(0.05), -1.0), 0.54814, 1e-5)
    np.testing.assert_allclose(loss_of("VPO", {"weight": 1.0}, CALIBRATED)[0], [[0.54814, 0]], 1e-5)
    # By the reference, whose samples both answers are: (0.5 - 1.5) / 2 = -0.5, and 0 of the running example
    found = loss_of("VPO", {"weight": 1.0, "calibration": "reference"}, CALIBRATED)[0]
    np.testing.assert_allclose(found, [[0.64814, 0]], 1e-5)
    np.testing.assert_allclose(loss_of("VPO", {"calibration": "reference"}, RUNNING)[0], [[DPO, 0]], 1e-5)
    row = ALGOS["VPO"]
    total = lambda lp: row.sequence_loss(
        row.config(weight=1.0, calibration="reference"), dataclasses.replace(RUNNING, logprob=lp), ()
    )[0].sum()
    # 0.1 sigmoid(-0.2) up and down, and 0.05 up on both
    np.testing.assert_allclose(jax.grad(total)(RUNNING.logprob), [[-0.095017, -0.004983]], atol=1e-6)
    with pytest.raises(ValueError, match=r"VPO\.calibration = 'worst'"):
        row.check(row.config(calibration="worst"), FACTS)


def test_ld_dpo_of_all_tokens_is_dpo_and_of_none_beyond_the_common_length_looks_at_that_alone():
    np.testing.assert_allclose(loss_of("LDDPO", {"alpha": 1.0}, COMMON)[0], [[DPO, 0]], 1e-6)
    found = loss_of("LDDPO", {"alpha": 0.0}, COMMON)[0]
    np.testing.assert_allclose(found, [[0.653947, 0]], 1e-6)  # log(1 + e^-0.08)
    row = ALGOS["LDDPO"]
    total = lambda x: row.sequence_loss(row.config(alpha=0.25), COMMON.replace(common_gain=x), ())[0].sum()
    # u^a = common + 0.25 (u - common): D = 0.5 + 0.125 + 0.3 + 0.175 = 1.1; -0.1 sigmoid(-0.11) 0.75
    slope = jax.grad(total)(COMMON.common_gain)
    np.testing.assert_allclose(slope, [[-0.035440, 0.035440]], atol=1e-6)
    nan = jnp.float32([[0.5, -0.3, np.nan, np.nan]])
    masked = sequences(
        [-10.0, -12.0, -1.0, -1.0], [-11.0, -11.0, -1.0, -1.0], [10, 12, 3, 3], mask=[True, True, False, False]
    )
    total = lambda x: row.sequence_loss(row.config(alpha=0.25), masked.replace(common_gain=x), ())[0].sum()
    np.testing.assert_allclose(jax.grad(total)(nan), [[-0.035440, 0.035440, 0, 0]], atol=1e-6)
    with pytest.raises(ValueError, match=r"LDDPO\.alpha = 1\.5"):
        row.check(row.config(alpha=1.5), FACTS)


def test_the_learner_sums_the_first_tokens_that_both_answers_of_a_pair_have():
    # Answers of 2 tokens and of 3 (one of them beyond the loss mask), and padding: the common length is 2.
    row = lambda x: jnp.asarray(x)[None, None]
    segment = row(jnp.array([0, 0, 0, 1, 1, 1, 1, 1, 2]))
    mask = row(jnp.array([False, True, True, False, True, False, True, True, False]))
    packed = PackedBatch(
        tokens=segment, positions=segment, segment=segment, shared_prefix=None, prefix_row=None, action_mask=mask,
        behaviour_logprobs=None, sampler_logprobs=None, sequence=row(jnp.arange(2)), temperature=jnp.float32(1),
        num_real=jnp.int32(1),
    )  # fmt: skip
    targets = SequenceTargets(row(jnp.ones(2, bool)), row(jnp.float32([1, 0])), row(jnp.ones(2)),
                              row(jnp.zeros(2, jnp.int32)), jnp.float32(1))  # fmt: skip
    nan = np.nan
    reference = row(jnp.float32([nan, -1, -1, nan, -1, nan, -1, -1, nan]))
    recomputed = Recomputed(ref_logprobs=reference)
    batch = TrainBatch(packed, recomputed, mask, mask.astype(jnp.float32), None, None, targets, jnp.float32(2))
    micro = micro_batch(batch, jnp.int32(0))
    logprobs = jnp.float32([[nan, -0.5, -0.8, nan, -1.2, nan, -0.9, -3.0, nan]])

    def total(logprobs, alpha):
        config = ALGOS["LDDPO"].config(beta=1.0, alpha=alpha)
        outputs = ModelOutputs(logprobs, None, None, None, None, None)
        return sequence_terms(outputs, micro, config, (), ALGOS["LDDPO"])[0].sum()

    # u_w = 0.5 + 0.2 of both tokens; u_l = -0.2 + 0.1 of the first two, and -2 of the third: D = 0.8, or 2.8
    found, slope = jax.jit(jax.value_and_grad(total))(logprobs, 0.0)
    np.testing.assert_allclose(found, np.log1p(np.exp(-0.8)), 1e-6)
    np.testing.assert_allclose(slope[0, [1, 2, 4, 6]], np.array([-1, -1, 1, 1]) / (1 + np.exp(0.8)), 1e-5)
    np.testing.assert_array_equal(slope[0, [0, 3, 5, 7, 8]], 0)
    np.testing.assert_allclose(total(logprobs, 1.0), np.log1p(np.exp(-2.8)), 1e-5)


def test_ipo_of_means_takes_log_ratios_by_their_answers_length():
    # (1 / 10 + 1 / 12 - 5)^2
    np.testing.assert_allclose(loss_of("IPO", {"over_tokens": "mean"}, RUNNING)[0], [[23.20028, 0]], 1e-6)


def test_a_pair_with_an_empty_answer_is_left_out():
    for name in BY_HAND:
        loss, metrics = loss_of(name, {}, dataclasses.replace(BY_HAND[name][1], length=jnp.int32([[10, 0]])))
        np.testing.assert_array_equal(loss, 0)
        assert not any(np.any(value) for value in metrics.values())


def test_the_shift_of_bco_follows_the_mean_and_begins_at_zero():
    row = ALGOS["BCO"]
    state = row.init_state(row.config())
    assert state == {"shift": 0}
    moved = dataclasses.replace(RUNNING, logprob=RUNNING.logprob + 4)  # u = 5, 3; beta times their mean is 0.4
    _, metrics = row.sequence_loss(row.config(), moved, state)
    np.testing.assert_allclose(metrics["bco/mean"], [[0.4, 0]], 1e-6)
    state = row.next_state(row.config(), {"shift": jnp.float32(1.0)}, {"bco/mean": jnp.float32(0.4)})
    np.testing.assert_allclose(state["shift"], 0.94, 1e-6)  # 0.9 * 1 + 0.1 * 0.4
    loss, _ = row.sequence_loss(row.config(), RUNNING, {"shift": jnp.float32(0.3)})
    np.testing.assert_allclose(loss, [[0.798139 + 0.513015, 0]], 1e-6)  # log(1 + e^0.2) + log(1 + e^-0.4)


@pytest.mark.parametrize(
    "name, field, value",
    [(name, "beta", 0.0) for name in BY_HAND if hasattr(ALGOS[name].config(), "beta")]
    + [
        ("ConservativeDPO", "noise", 0.5),
        ("RobustDPO", "noise", -0.1),
        ("EXO", "noise", 0.0),
        ("ORPO", "weight", 0.0),
        ("SimPO", "gamma", -1.0),
        ("CPO", "weight", -1.0),
        ("FDPO", "alpha", 1.5),
        ("BCO", "decay", 1.0),
        ("RPO", "weight", 0.0),
        ("VPO", "weight", 0.0),
        ("LDDPO", "alpha", -0.5),
        ("CPL", "alpha", 0.0),
        ("CPL", "bias", 0.0),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(name, field, value):
    row = ALGOS[name]
    row.check(row.config(), FACTS)
    with pytest.raises(ValueError, match=rf"{name}\.{field} = {value}"):
        row.check(row.config(**{field: value}), FACTS)
