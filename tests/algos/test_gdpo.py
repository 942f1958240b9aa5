from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import credited, two_prompts

from jrl.algos import ALGOS
from jrl.algos.contract import Facts
from jrl.algos.gdpo import GDPO
from jrl.compatibility import not_rewarded
from jrl.config.errors import ConfigError
from jrl.resolve import load_config
from jrl.rollout.strategies.contract import PLAIN

OBJECTIVE = ALGOS["GDPO"]
FACTS = Facts(samples=8, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def scored(second):
    """Returns the groups with the reward as one component and another one."""
    return two_prompts().replace(components={"exact": two_prompts().reward, "format": jnp.array(second)})


SAME = [1.0, 1.0, 1.0, 1.0, 1.0, jnp.nan, 9.0]


def test_components_are_compared_in_their_own_deviations_and_whitened():
    # Exact in group 0: std1 of 1, 0, 0 is 0.577350: 1.154699, -0.577349; in group 1: +-0.707106. The format is equal in
    # all rows and adds 0. Rows have 1, 2, 3, 1 and 2 tokens.
    z = np.array([1.154699, 0.707106, -0.577349, -0.707106, -0.577349])
    each = np.repeat(z, [1, 2, 3, 1, 2])
    expected = np.append((z - each.mean()) / np.sqrt(each.var(ddof=1) + 1e-8), [0, 0])
    np.testing.assert_allclose(credited(OBJECTIVE, GDPO(), scored(SAME)), expected, rtol=1e-5)
    # A component that differs: the exact one reversed takes all of it away at weight 1, up to a rounding that
    # whitening makes larger, and half of it at 0.5.
    against = scored([0.0, 0.0, 1.0, 1.0, 1.0, jnp.nan, 9.0])
    np.testing.assert_allclose(credited(OBJECTIVE, GDPO(), against), np.zeros(7), atol=1e-3)
    np.testing.assert_allclose(credited(OBJECTIVE, GDPO(weights=(1.0, 0.5)), against), expected, rtol=1e-5)
    np.testing.assert_allclose(credited(OBJECTIVE, GDPO(weights=(0.5, 1.0)), against), -expected, rtol=1e-5)


def test_a_verifier_that_does_not_apply_to_a_row_leaves_its_other_components():
    partly = scored([jnp.nan, 1.0, 1.0, 1.0, 1.0, jnp.nan, 9.0])
    np.testing.assert_allclose(
        credited(OBJECTIVE, GDPO(), partly), credited(OBJECTIVE, GDPO(), scored(SAME)), rtol=1e-6
    )


def test_components_and_weights_have_one_length():
    with pytest.raises(ValueError, match=r"3 numbers and the reward 2 components \(exact, format\)"):
        credited(OBJECTIVE, GDPO(weights=(1.0, 1.0, 1.0)), scored(SAME))
    with pytest.raises(ValueError, match="the reward 0 components"):
        credited(OBJECTIVE, GDPO(), two_prompts())


def test_tokens_weigh_alike():
    mask = jnp.array([[True, False, False], [True, True, True], [False] * 3])
    np.testing.assert_array_equal(OBJECTIVE.weights(GDPO(), mask, 3), mask)
    assert OBJECTIVE.denominator(GDPO(), mask, 3, 3) == 4


@pytest.mark.parametrize(
    "config, facts, message",
    [
        (GDPO(weights=(0.0, 0.0)), FACTS, r"GDPO\.weights = \(0\.0, 0\.0\)"),
        (GDPO(), FACTS._replace(not_rewarded=("Exact",)), "a weight of 0 or less in the reward: Exact. Give"),
    ],
)
def test_illegal_combinations_are_refused(config, facts, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, facts)


JUDGED = ["Shaping.constraints=@Constraints()", "Constraints.components=('Regex',)"]


@pytest.mark.parametrize(
    "bindings",
    [["Shaping.missing_stop=@MissingStop()"], ["Shaping.group_length=@GroupLength()"], JUDGED],
    ids=["missing_stop", "group_length", "constraints"],
)
def test_shaping_of_the_sum_of_components_is_refused(bindings):
    with pytest.raises(
        ConfigError, match=r"GDPO learns from the components of the reward, and Online\.shaping changes"
    ):
        load_config("configs/algos/gdpo.gin", ["Online.shaping=@Shaping()", *bindings])


def test_constraints_may_mask_rows_without_a_verdict():
    bindings = ["Online.shaping=@Shaping()", *JUDGED, "Constraints.infeasible_reward=None"]
    load_config("configs/algos/gdpo.gin", bindings)


RUBRIC = ["Config.judges=[@Judge()]", "Judge.name='j'", "Judge.model='m'", "Judge.address='http://localhost:1/v1'",
          "Judge.grading=@Rubric()", "Rubric.items={'It is right.': 1.0, 'It is rude.': -1.0}"]  # fmt: skip


@pytest.mark.parametrize(
    "bindings, names",
    [
        (["Exact.weight=0.0"], ["Exact"]),  # held out: GDPO gave it the weight 1
        (["Regex.weight=-0.1"], ["Regex"]),  # a penalty: it was a reward
        (RUBRIC, ["Judge/j/item_1", "Judge/j/item_2"]),  # parts of a score that is a component itself
        (["Online.strategy=@SelfCorrection()"], ["first_attempt"]),
    ],
    ids=["watching", "penalty", "rubric", "attempts"],
)
def test_components_without_a_reward_need_weights(bindings, names):
    refused = re.escape(f"a weight of 0 or less in the reward: {', '.join(names)}. Give GDPO.weights")
    with pytest.raises(ConfigError, match=refused):
        load_config("configs/algos/gdpo.gin", bindings)
    load_config("configs/algos/gdpo.gin", [*bindings, "GDPO.weights=(0.0, 1.0)"])


def test_sources_of_components_without_a_reward_are_all_named():
    named = lambda recipe, *bindings: not_rewarded(
        (config := load_config(f"configs/algos/{recipe}.gin", bindings)[0]).stages[-1], config, PLAIN
    )
    over = [f"pair_model/over_{s}" for s in range(3)]
    pairs = named("nash_md_pair_model", "Online.samples=3", "MixtureOpponent.opponents=1")
    assert pairs == ("Exact", "pair_model/wins", *over)
    assert named("reward_ensemble") == ("Exact",)
    watching = "Online.rewards={'first': 0.0, 'second': 0.0}"
    assert named("reward_ensemble", watching) == ("Exact", "role/ensemble")
    assert named("reward_ensemble", watching, "Online.ensemble=None") == ("Exact", "role/first", "role/second")
    assert named("process_rewards") == ("process/worst_step",)
    assert named("sequence_reward_model") == ("Exact", "corrector/kept")
    assert named("gdpo") == ()
