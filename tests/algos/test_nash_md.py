"""Nash-MD: who wins against the mixture, and what is learned from it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.contract import Facts, Groups, Tokens
from jrl.algos.nash_md import NashMD
from jrl.ops.win_rate import win_probability
from jrl.types import Finish

NAN = jnp.nan
OBJECTIVE = ALGOS["NashMD"]


def test_the_win_rate_by_hand():
    reward = jnp.array([0.7, 0.2, 0.7, 0.1, 0.5, 0.7, NAN, NAN])
    group = jnp.array([0, 0, 0, 0, 0, 1, 1, 0])
    players = jnp.array([True, True, False, False, False, True, False, False])
    opponents = jnp.array([False, False, True, True, True, False, False, False])
    # 0.7 ties with 0.7 and beats 0.1 and 0.5: 2.5 / 3; 0.2 beats 0.1 alone: 1/3. The other prompt has no opponent.
    wins = jax.jit(win_probability, static_argnames="num_groups")
    found = wins(reward, group, players, opponents, num_groups=2)
    np.testing.assert_allclose(found, [2.5 / 3, 1 / 3, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5], rtol=1e-6)
    # Among themselves: 0.7 beats 0.2, and nobody plays against itself.
    np.testing.assert_allclose(wins(reward, group, players, players, num_groups=2)[:2], [1, 0])
    # As every row compared with every opponent says, whatever ties there are.
    rng = np.random.default_rng(0)
    reward, group = rng.integers(-2, 3, 24).astype(np.float32), rng.integers(0, 3, 24)
    met = (group[:, None] == group[None, :]) & ~np.eye(24, dtype=bool)
    beats = (reward[:, None] > reward[None, :]) + 0.5 * (reward[:, None] == reward[None, :])
    everyone = np.ones(24, bool)
    np.testing.assert_allclose(
        wins(reward, group, everyone, everyone, num_groups=3), (beats * met).sum(1) / met.sum(1), rtol=1e-6
    )


def played():
    """Two prompts: two rows of the policy and two of the mixture, one of them without a verdict; then no opponent at
    all, and a row that was aborted."""
    reward = jnp.array([1.0, 0.0, 0.0, NAN, 3.0, 2.0, 9.0])
    mixed = jnp.array([False, False, True, True, False, False, False])
    empty = mixed | (jnp.arange(7) == 6)
    return Groups(
        reward=reward,
        outcome=reward,
        valid=~jnp.isnan(reward),
        group=jnp.array([0, 0, 0, 0, 1, 1, 1]),
        action_mask=jnp.ones((7, 2), bool) & ~empty[:, None],
        finish=jnp.zeros(7, jnp.int8),
        num_groups=2,
        max_completion=2,
        turn=jnp.where(mixed[:, None], -1, jnp.zeros((7, 2), jnp.int8)).astype(jnp.int8),
    )


def test_rows_are_compared_with_the_opponents_of_their_prompt():
    groups = played()
    found, state, counters = jax.jit(lambda g: OBJECTIVE.advantages(NashMD(), g, g.reward, ()))(groups)
    # Against 0: 1 wins, 0 ties. Without opponents, 3 beats 2.
    np.testing.assert_allclose(found[:, 0], [0.5, 0, 0, 0, 0.5, -0.5, 0])
    np.testing.assert_array_equal(found[:, 0], found[:, 1])
    assert state == () and counters["win_rate"] == pytest.approx((1 + 0.5 + 1 + 0) / 4)
    assert int(counters["aborted"]) == 1  # the empty one; opponents are not
    assert OBJECTIVE.keep(NashMD(), groups).tolist() == [True, True, False, False, True, True, False]


def test_a_row_that_was_compared_with_nobody_is_left_out():
    # One row alone by its reward; by a pair model the second of two, of which nothing was said.
    alone = played().replace(group=jnp.array([0, 0, 0, 0, 1, 2, 2]), num_groups=3)
    assert OBJECTIVE.keep(NashMD(), alone).tolist() == [True, True, False, False, False, False, False]
    found, _, counters = OBJECTIVE.advantages(NashMD(), alone, alone.reward, ())
    assert counters["win_rate"] == pytest.approx((1 + 0.5) / 2) and int(counters["group_of_one"]) == 2
    np.testing.assert_array_equal(found[4:], 0)
    over = {0: [NAN] * 7, 1: [NAN] * 7, 2: [0.9, NAN, NAN, NAN, NAN, NAN, NAN], 3: [NAN] * 7}
    over[0][2] = 0.3
    groups = played().replace(
        components={f"pair_model/over_{s}": jnp.float32(column) for s, column in over.items()},
        sample=jnp.array([0, 1, 2, 3, 0, 1, 2], jnp.int32),
    )
    config = NashMD(preference="pair_model")
    assert jax.jit(lambda g: OBJECTIVE.keep(config, g))(groups).tolist() == [True] + [False] * 6
    found, _, counters = OBJECTIVE.advantages(config, groups, groups.reward, ())
    # (0.9 + 1 - 0.3) / 2 = 0.8
    assert counters["win_rate"] == pytest.approx(0.8) and found[0, 0] == pytest.approx(0.3)


def test_a_pair_model_says_how_surely_an_opponent_is_beaten():
    nan = jnp.nan
    # Samples 2 and 3 of the first prompt are the mixture's, and 3 has no verdict: 0 beats 2 by 0.9, 1 by 0.25. Of the
    # second prompt sample 0 beats 1 by 0.7.
    over = {
        0: [nan, 0.4, 0.1, nan, nan, 0.3, nan],
        1: [0.6, nan, 0.75, nan, 0.7, nan, nan],
        2: [0.9, 0.25, nan, nan, nan, nan, nan],
        3: [1.0, 1.0, 0.5, nan, nan, nan, nan],
    }
    groups = played().replace(
        components={f"pair_model/over_{s}": jnp.float32(column) for s, column in over.items()},
        sample=jnp.array([0, 1, 2, 3, 0, 1, 2], jnp.int32),
    )
    config = NashMD(preference="pair_model")
    found, _, counters = jax.jit(lambda g: OBJECTIVE.advantages(config, g, g.reward, ()))(groups)
    np.testing.assert_allclose(found[:, 0], [0.4, -0.25, 0, 0, 0.2, -0.2, 0], atol=1e-6)
    assert counters["win_rate"] == pytest.approx((0.9 + 0.25 + 0.7 + 0.3) / 4)


def test_an_opponent_that_could_not_be_judged_is_counted():
    counters = OBJECTIVE.advantages(NashMD(), played(), played().reward, ())[2]
    assert int(counters["unscorable"]) == 1  # the second opponent of the first prompt
    assert int(counters["group_of_one"]) == 0
    # Of padding, nothing is: neither rows nor opponents of a prompt without an action.
    groups = played()
    padded = groups.replace(valid=groups.valid & (groups.group == 1), action_mask=groups.action_mask.at[:4].set(False))
    counters = OBJECTIVE.advantages(NashMD(), padded, padded.reward, ())[2]
    assert int(counters["unscorable"]) == 0 and int(counters["aborted"]) == 1
    # One whose sampling failed is aborted too, as of any other row.
    failed = groups.replace(finish=jnp.where(jnp.isnan(groups.reward), Finish.FAILED, 0).astype(jnp.int8))
    counters = OBJECTIVE.advantages(NashMD(), failed, failed.reward, ())[2]
    assert int(counters["unscorable"]) == 1 and int(counters["aborted"]) == 2
    # A row with one opponent is compared, one whose opponent was not judged is alone.
    for judged, alone in ((True, 0), (False, 1)):
        one = groups.replace(valid=(jnp.arange(7) == 0) | ((jnp.arange(7) == 2) & judged))
        assert int(OBJECTIVE.advantages(NashMD(), one, one.reward, ())[2]["group_of_one"]) == alone


def test_the_gradient_is_that_of_the_published_loss():
    # P = 0.7 and log-probs that add up to -5: -(0.7 - 0.5) * -5 = 1, whose gradient by each log-prob is -0.2.
    new = jnp.array([-2.0, -3.0, NAN])
    batch = Tokens(
        logprobs=new, old_logprobs=new, behaviour_logprobs=new, ref_logprobs=jnp.array([-2.0, -4.0, NAN]),
        entropy=jnp.ones(3), advantages=jnp.full(3, 0.2), mask=jnp.array([True, True, False]),
        segment=jnp.zeros(3, jnp.int32), num_segments=1,
    )  # fmt: skip
    loss = lambda lp, kl: OBJECTIVE.token_loss(NashMD(kl=kl), batch.replace(logprobs=lp), ())[0].sum()
    published = lambda lp: -(0.7 - 0.5) * lp[:2].sum()
    assert published(new) == pytest.approx(1.0)
    np.testing.assert_allclose(jax.grad(loss)(new, 1e-9), jax.grad(published)(new), atol=1e-6)
    # And the tie: k2 of the second token is 1 / 2, its gradient 1.
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(new, 0.1), [-0.2, -0.2 + 0.1, 0], atol=1e-6)
    assert loss(new, 0.1) - loss(new, 1e-9) == pytest.approx(0.1 / 2, abs=1e-6)


def test_the_loss_of_a_sequence_is_a_sum():
    mask = jnp.array([[True, True, True], [True, False, False], [False] * 3])
    assert OBJECTIVE.denominator(NashMD(), mask, 3, 3) == 2
    np.testing.assert_array_equal(OBJECTIVE.weights(NashMD(), mask, 3), mask)


def test_without_a_tie_it_is_refused():
    facts = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=4)
    with pytest.raises(ValueError, match=r"NashMD.kl = 0.0 must be above 0"):
        OBJECTIVE.check(NashMD(kl=0.0), facts)


def test_rewards_are_shaped_only_where_they_say_who_wins():
    facts = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=4)
    facts = facts._replace(pair_model=True, changes_rewards=True)
    OBJECTIVE.check(NashMD(), facts)
    with pytest.raises(ValueError, match=r"NashMD learns from the preferences of Online\.pair_model, and Online\.shap"):
        OBJECTIVE.check(NashMD(preference="pair_model"), facts)
