"""Objectives of pairs of samples by hand: online IPO and SimPO, OSP, INPO, XPO."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pair_objectives import MEANS, RUNNING, sequences

import jrl
from jrl.algos import ALGOS, sampled_pairs
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts, Pairs
from jrl.algos.inpo import INPO
from jrl.algos.osp import OSP
from jrl.algos.xpo import XPO
from jrl.config import ConfigError
from jrl.learning.credit import compared
from jrl.resolve import load_config

FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=6)
SAMPLED = dataclasses.replace(
    RUNNING, behaviour_logprob=jnp.float32([[-10.5, -11.5]]), value=jnp.zeros((1, 2), jnp.float32)
)
THEIRS = dataclasses.replace(SAMPLED, value=jnp.float32([[0, 1]]))  # the other answer is the reference's

CALIBRATED = dataclasses.replace(
    THEIRS, logprob=jnp.float32([[-8.5, -10.5]]), ref_logprob=jnp.float32([[-11.0, -11.0]])
)  # u_w = 2.5, u_l = 0.5, D = 2

BY_HAND = {
    "OnlineIPO": ({}, SAMPLED, 9.0),  # (2 - 1 / 0.2)^2
    "OnlineSimPO": ({}, dataclasses.replace(MEANS, ref_logprob=None), 0.693147),  # log(1 + e^(1 - 2 * 0.5))
    # -(0.8 log sigmoid(0.2) + 0.2 log sigmoid(-0.2))
    "OSP": ({}, dataclasses.replace(SAMPLED, label=jnp.float32([[0.8, 0.2]])), 0.638139),
    "INPO": ({"eta": 0.5, "tau": 0.1}, SAMPLED, 0.04),  # (2 - 0.2 * 0 - 0.8 * 1 - 1)^2
    # P21: u(y') = 0.5 of the other answer, the reference's; DPO + 1 * 0.1 * 0.5
    "OnlineVPO": ({"weight": 1.0}, CALIBRATED, 0.64814),
    "XPO": ({"alpha": 0.01}, THEIRS, 0.598139 - 0.12),  # -log sigmoid(0.2) + 0.01 * -12
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    fields, pairs, value = BY_HAND[name]
    row = ALGOS[name]
    loss, metrics = jax.jit(row.sequence_loss)(row.config(**fields), pairs, ())
    np.testing.assert_allclose(loss, [[value, 0]], 2e-6)
    np.testing.assert_array_equal(metrics["pairs/accuracy"], [[1, 0]])


@pytest.mark.parametrize("name", BY_HAND)
def test_the_gradient_is_that_of_small_differences(name):
    fields, pairs, _ = BY_HAND[name]
    row = ALGOS[name]
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64) if x.dtype == jnp.float32 else x, pairs)
        total = lambda lp: row.sequence_loss(row.config(**fields), dataclasses.replace(wide, logprob=lp), ())[0].sum()
        step = 1e-5 * jnp.eye(2)[:, None]
        expected = [(total(wide.logprob + d) - total(wide.logprob - d)) / 2e-5 for d in step]
        found = jax.grad(total)(wide.logprob)[0]
        np.testing.assert_allclose(found, expected, 1e-6, 1e-9)
        # The loss falls with the preferred answer over the other; INPO's margin is beyond its mark, and is drawn back.
        assert np.sign(found[0] - found[1]) == (1 if name == "INPO" else -1)


@pytest.mark.parametrize("name", BY_HAND)
def test_what_is_masked_is_not_read(name):
    nan, mask = np.nan, [True, False, True, False]
    places = lambda x: jnp.float32([[x[0, 0], nan, x[0, 1], nan]])
    fields, pairs, value = BY_HAND[name]
    wide = sequences([0.0] * 4, [0.0] * 4, [10, 7, 12, 0], [0.0] * 4, mask)
    wide = dataclasses.replace(
        wide,
        **{
            field: None if getattr(pairs, field) is None else places(getattr(pairs, field))
            for field in ("logprob", "ref_logprob", "behaviour_logprob", "value", "label")
        },
        unit=jnp.int32([[0, 1, 0, 1]]),
    )
    row = ALGOS[name]
    total = lambda lp: row.sequence_loss(row.config(**fields), dataclasses.replace(wide, logprob=lp), ())[0].sum()
    found, slope = jax.jit(jax.value_and_grad(total))(wide.logprob)
    np.testing.assert_allclose(found, value, 2e-6)
    np.testing.assert_array_equal(slope[0, 1::2], 0)
    assert np.isfinite(slope).all()


def test_inpo_with_tau_at_eta_is_ipo_and_with_none_it_looks_at_the_last_policy_alone():
    loss = lambda name, config: ALGOS[name].sequence_loss(config, SAMPLED, ())[0][0, 0]
    np.testing.assert_allclose(loss("INPO", INPO(eta=0.1, tau=0.1)), loss("IPO", ALGOS["IPO"].config(beta=0.1)), 1e-6)
    np.testing.assert_allclose(loss("INPO", INPO(eta=0.5, tau=0.0)), 0, atol=1e-12)  # (2 - 1 - 1)^2


def test_the_labels_of_osp_are_how_strongly_the_rewards_prefer():
    groups = sample_groups()  # rewards [1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0], row 10 without a verdict
    row = ALGOS["OSP"]
    found = jax.jit(lambda c, g: row.pairs(c, g, g.reward))(OSP(temperature=0.5), groups)
    np.testing.assert_array_equal(found.unit, [0, 0, -1, -1, -1, -1, -1, -1, 2, 2, -1, -1])
    strong, weak = 0.880797, 0.119203  # sigmoid(2), sigmoid(-2)
    np.testing.assert_allclose(found.label, [strong, weak, 0, 0, 0, 0, 0, 0, weak, strong, 0, 0], 1e-5)


def test_a_pair_of_osp_whose_rewards_hardly_differ_still_counts():
    groups = sample_groups()
    nearly = groups.replace(reward=jnp.where(groups.reward > 0, jnp.nextafter(jnp.float32(0.3), 1), jnp.float32(0.3)))
    found = ALGOS["OSP"].pairs(OSP(), nearly, nearly.reward)
    assert np.asarray(found.label > 0.5).tolist() == [True, False, *[False] * 7, True, False, False]
    np.testing.assert_array_equal(found.label[:2].sum(), 1)


def test_xpo_compares_the_kth_samples_of_the_policy_with_those_of_the_reference():
    groups = sample_groups()  # of each group rows 0 and 1 are the policy's, 2 and 3 the reference's
    found = jax.jit(lambda g: ALGOS["XPO"].pairs(XPO(), g, g.reward))(groups)
    # 1 over 0, 0 under 1; ties; a row without a verdict, 1 over 0
    np.testing.assert_array_equal(found.unit, [0, 1, 0, 1, -1, -1, -1, -1, -1, 5, -1, 5])
    np.testing.assert_array_equal(found.label, [1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(found.value, [0, 0, 1, 1] * 3)


def test_the_bonus_of_xpo_is_of_the_references_answer_whichever_is_preferred():
    theirs = dataclasses.replace(SAMPLED, value=jnp.float32([[1, 0]]))
    loss, _ = ALGOS["XPO"].sequence_loss(XPO(alpha=0.01), theirs, ())
    np.testing.assert_allclose(loss, [[0.598139 - 0.10, 0]], 1e-5)


def test_online_vpo_moves_as_xpo_does_at_alpha_weight_times_beta():
    row, other = ALGOS["OnlineVPO"], ALGOS["XPO"]
    slope = lambda row, config: jax.grad(
        lambda lp: row.sequence_loss(config, dataclasses.replace(CALIBRATED, logprob=lp), ())[0].sum()
    )(CALIBRATED.logprob)
    found = slope(row, row.config(weight=0.3, beta=0.2))
    np.testing.assert_allclose(found, slope(other, other.config(alpha=0.06, beta=0.2)), 1e-6)
    assert np.sign(found[0, 1]) == 1  # the reference's answer becomes less likely
    theirs = dataclasses.replace(CALIBRATED, value=jnp.float32([[1, 0]]))  # its answer is preferred: u = 2.5
    loss, _ = row.sequence_loss(row.config(weight=1.0), theirs, ())
    np.testing.assert_allclose(loss, [[0.598139 + 0.25, 0]], 1e-5)


def test_pairs_of_a_tournament_are_the_best_and_the_worst_and_their_margin_is_of_wins():
    groups = sample_groups()  # rewards [1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0], row 10 without a verdict
    row, pairs = ALGOS["OnlineDPO"], jax.jit(lambda c, g: ALGOS["OnlineDPO"].pairs(c, g, g.reward))
    found = pairs(row.config(pairing="tournament"), groups)
    for scale in (1.0, 1e-3):  # what is beaten by how much does not matter
        scaled = groups.replace(reward=groups.reward * scale)
        np.testing.assert_array_equal(pairs(row.config(pairing="tournament"), scaled).unit, found.unit)
    np.testing.assert_array_equal(found.unit, pairs(row.config(), groups).unit)
    np.testing.assert_array_equal(found.label, pairs(row.config(), groups).label)
    # Of group 0 rows 0 and 3 win 2.5 of 3, rows 1 and 2 0.5 of 3: 2/3 apart; of group 2 1 against 0.25: 3/4.
    at = lambda margin: pairs(row.config(pairing="tournament", margin=margin), groups).unit
    np.testing.assert_array_equal(at(0.7), [-1] * 8 + [2, 2, -1, -1])
    np.testing.assert_array_equal(at(0.8), [-1] * 12)
    with pytest.raises(ValueError, match=r"OnlineDPO\.margin = 1\.0 must be below 1"):
        row.check(row.config(pairing="tournament", margin=1.0), FACTS)


def compared_groups():
    """Returns `sample_groups` with a pair model's word on them: of group 0 sample 2 beats 0 by 0.75, 1 by 0.9 and 3 by
    0.6, 0 and 3 beat 1 by 0.7; of group 1 they go in a circle; of group 2 rows 8 and 9 were not compared."""
    nan = np.nan
    of_0 = [[nan, 0.7, 0.25, 0.5], [0.3, nan, 0.1, 0.3], [0.75, 0.9, nan, 0.6], [0.5, 0.7, 0.4, nan]]
    circle = [[nan, 0.9, 0.5, 0.1], [0.1, nan, 0.9, 0.5], [0.5, 0.1, nan, 0.9], [0.9, 0.5, 0.1, nan]]
    of_2 = [[nan, nan, 0.2, 0.4], [nan, nan, 0.6, 0.8], [0.8, 0.4, nan, 0.5], [0.6, 0.2, 0.5, nan]]
    preference = jnp.float32([*of_0, *circle, *of_2])
    groups = sample_groups()  # rewards [1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0], row 10 without a verdict
    over = {f"pair_model/over_{s}": preference[:, s] for s in range(4)}
    return groups.replace(components={**groups.components, **over})


def test_labels_by_a_pair_model_are_its_strengths_and_no_pair_is_made_against_it():
    groups, model = compared_groups(), {"preference": "pair_model"}
    run = jax.jit(lambda c, g: ALGOS["OSP"].pairs(c, g, g.reward))
    by_wins = run(OSP(pairing="tournament", **model), groups)
    # Shares of wins 0.483, 0.233, 0.75 and 0.533: sample 2 meets sample 1. Of group 1 all have a half. Of group 2 row 9
    # (0.8) would meet row 8 (0.4), and those two were not compared.
    np.testing.assert_array_equal(by_wins.unit, [-1, 0, 0, *[-1] * 9])
    np.testing.assert_allclose(by_wins.label, [0, 0.1, 0.9, *[0] * 9], 1e-6)
    # By reward row 0 is preferred to row 1, which the model says too, by 0.7.
    by_reward = run(OSP(**model), groups)
    np.testing.assert_allclose(by_reward.label, [0.7, 0.3, *[0] * 10], 1e-6)
    assert ALGOS["OnlineIPO"].pairs is ALGOS["INPO"].pairs is sampled_pairs.strong_pairs
    row = ALGOS["OnlineDPO"]
    hard = jax.jit(lambda c, g: row.pairs(c, g, g.reward))
    np.testing.assert_array_equal(hard(row.config(**model), groups).label, [1, *[0] * 11])
    # Of the rewards row 1 is preferred to row 0, against what the model says: no pair.
    against = groups.replace(reward=(jnp.arange(12) % 4 == 1).astype(jnp.float32))
    found = hard(row.config(**model), against)
    np.testing.assert_array_equal(found.unit[:4], -1)
    np.testing.assert_array_equal(found.label[:4], 0)
    with pytest.raises(ValueError, match="no pair model has compared these rows"):
        row.pairs(row.config(**model), sample_groups(), groups.reward)
    with pytest.raises(ValueError, match=r"OnlineDPO\.preference = 'pair_model', and the stage has none"):
        row.check(row.config(**model), FACTS)
    row.check(row.config(**model), FACTS._replace(pair_model=True))


SOFT = dataclasses.replace(SAMPLED, label=jnp.float32([[0.8, 0.2]]))


@pytest.mark.parametrize(
    "name, fields, value",
    [
        ("OnlineIPO", {}, 1.0),  # (2 - 0.6 / 0.2)^2
        ("INPO", {"eta": 0.5, "tau": 0.1}, 0.36),  # (2 - 0.2 * 0 - 0.8 * 1 - 0.6)^2
    ],
)
def test_a_strength_has_the_gradient_of_labels_drawn_from_it(name, fields, value):
    row = ALGOS[name]
    config = row.config(**fields)
    np.testing.assert_allclose(jax.jit(row.sequence_loss)(config, SOFT, ())[0], [[value, 0]], 2e-6)

    def slope(pairs):
        total = lambda lp: row.sequence_loss(config, dataclasses.replace(pairs, logprob=lp), ())[0].sum()
        return jax.grad(total)(pairs.logprob)

    certain, other = SAMPLED, dataclasses.replace(SAMPLED, label=jnp.float32([[0, 1]]))
    np.testing.assert_allclose(slope(SOFT), 0.8 * slope(certain) + 0.2 * slope(other), 1e-5)


def test_xpo_and_samples_of_the_reference_go_together():
    path = "configs/algos/xpo.gin"
    jrl.load_config(path)
    with pytest.raises(ConfigError, match=r"XPO with Online\.strategy = None: XPO and OnlineVPO compare"):
        jrl.load_config(path, ["Online.strategy=None"])
    with pytest.raises(ConfigError, match=r"XPO with Online\.strategy = @Branching\(\): .*; use the two together"):
        jrl.load_config(path, ["Online.strategy=@Branching()", "Branching.first=2"])  # to leave it out would not do
    with pytest.raises(ConfigError, match=r"OnlineDPO with Online\.strategy = @ReferenceSamples"):
        jrl.load_config(path, ["Online.objective=@OnlineDPO()"])
    with pytest.raises(ConfigError, match=r"Online\.samples = 3 has no half"):
        jrl.load_config(path, ["Online.samples=3"])


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("INPO", {"tau": 0.2}, r"INPO\.tau = 0\.2 must be from 0 to INPO\.eta = 0\.1"),
        ("INPO", {"eta": 0.0}, r"INPO\.eta = 0\.0 must be above 0"),
        ("OSP", {"temperature": 0.0}, r"OSP\.temperature = 0\.0 must be above 0"),
        ("OSP", {"beta": 0.0}, r"OSP\.beta = 0\.0"),
        ("XPO", {"alpha": 0.0}, r"XPO\.alpha = 0\.0"),
        ("OnlineVPO", {"weight": 0.0}, r"OnlineVPO\.weight = 0\.0"),
        ("OnlineVPO", {"beta": 0.0}, r"OnlineVPO\.beta = 0\.0"),
        ("XPO", {"beta": -1.0}, r"XPO\.beta = -1\.0"),
        ("OnlineIPO", {"margin": -1.0}, r"OnlineIPO\.margin = -1\.0"),
        ("OnlineIPO", {"beta": 0.0}, r"OnlineIPO\.beta = 0\.0"),
        ("OnlineSimPO", {"pairing": "all"}, r"OnlineSimPO\.pairing = 'all'"),
        ("OnlineSimPO", {"length_penalty": 0.0}, r"OnlineSimPO\.length_penalty = 0\.0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(name, fields, message):
    row = ALGOS[name]
    row.check(row.config(), FACTS)
    with pytest.raises(ValueError, match=message):
        row.check(row.config(**fields), FACTS)


def test_what_changes_rewards_is_refused_where_a_pair_model_alone_says_who_wins():
    row, facts = ALGOS["OnlineDPO"], FACTS._replace(pair_model=True)
    options = {"preference": "pair_model", "pairing": "tournament"}
    row.check(row.config(**options), facts)
    row.check(row.config(preference="pair_model", length_penalty=0.1), facts._replace(changes_rewards=True))
    with pytest.raises(
        ValueError, match=r"OnlineDPO learns from the preferences of Online\.pair_model, and Online\.sh"
    ):
        row.check(row.config(**options), facts._replace(changes_rewards=True))
    with pytest.raises(ValueError, match=r"OnlineDPO\.length_penalty = 0\.1 lowers rewards, and a tournament"):
        row.check(row.config(**options, length_penalty=0.1), facts)


def test_completions_that_begin_in_others_are_not_compared():
    # a b c and, from before c, a branch d: the same log-ratios of c and d, 0, are a margin of 0. But a and b, 0.5 each,
    # are actions of the first row alone: D = (-3 + 4) - (-1 + 1) = 1, which a preference for it would raise.
    branched = dataclasses.replace(
        SAMPLED, logprob=jnp.float32([[-3, -1]]), ref_logprob=jnp.float32([[-4, -1]]), length=jnp.int32([[3, 1]])
    )
    metrics = ALGOS["OnlineDPO"].sequence_loss(ALGOS["OnlineDPO"].config(), branched, ())[1]
    np.testing.assert_array_equal(metrics["pairs/margin"], [[1, 0]])
    branching = ["Online.strategy=@Branching()", "Online.samples=16"]
    for name in ("OnlineDPO", "PRO"):
        with pytest.raises(ConfigError, match=f"{name} compares the log-probs of a prompt's completions"):
            load_config("configs/algos/toy.gin", [f"Online.objective=@{name}()", *branching])
    reward_model = ["Online.objective=@OnlineBradleyTerry()", "Online.trains='reward'"]  # reads whole texts
    load_config("configs/algos/toy.gin", [*reward_model, *branching])
    # The policy's own completions begin alike; an opponent's have no actions and are in no pair.
    opponent = ["Online.strategy=@MixtureOpponent()", "Online.samples=4"]
    load_config("configs/algos/toy.gin", ["Online.objective=@OnlineDPO()", *opponent])


def test_inpo_refuses_a_distribution_that_is_not_the_policys():
    with pytest.raises(ValueError, match="INPO compares with the log-probs of the distribution that drew a pair"):
        ALGOS["INPO"].check(INPO(), FACTS._replace(truncated_sampling=True))


def test_a_comparison_needs_its_preferred_row_and_another():
    # In turn: a pair that lost its other side, one that lost its preferred one, a whole one; a list without its best,
    # and one with its best and one more; no comparison.
    unit = jnp.array([0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4, -1], jnp.int32)
    label = jnp.array([1.0, 0, 1, 0, 0.8, 0.2, 1, 0, 0, 0, 1, 0, 1])
    rows = jnp.array([1, 0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1], bool)
    found = jax.jit(compared)(Pairs(label, unit, jnp.ones(13)), rows)
    np.testing.assert_array_equal(found, np.isin(np.arange(13), [4, 5, 10, 11]))
