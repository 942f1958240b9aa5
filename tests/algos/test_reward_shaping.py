"""Shaping of rewards before an objective sees them: by hand, what is masked, its order, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos.contract import Groups
from jrl.algos.reward_shaping import (
    Constraints,
    ExplorationMix,
    GroupLength,
    LengthPenalty,
    MissingStop,
    Potential,
    Shaping,
    check_shaping,
    components_read,
    shaped,
)
from jrl.config.errors import ConfigError
from jrl.resolve import load_config
from jrl.types import Finish

NAN = float("nan")
STOP, TEXT, CUT = int(Finish.STOP_TOKEN), int(Finish.STOP_STRING), int(Finish.LENGTH)


def rows(reward, length, finish=None, outcome=None, valid=None, **components):
    """Returns rows of one prompt, of so many sampled tokens each."""
    count = len(reward)
    return Groups(
        reward=jnp.array(reward, jnp.float32),
        outcome=jnp.array(reward if outcome is None else outcome, jnp.float32),
        valid=jnp.ones(count, bool) if valid is None else jnp.array(valid),
        group=jnp.zeros(count, jnp.int32),
        action_mask=jnp.arange(8)[None, :] < jnp.array(length)[:, None],
        finish=jnp.array([STOP] * count if finish is None else finish, jnp.int8),
        num_groups=1,
        max_completion=8,
        components={name: jnp.array(values, jnp.float32) for name, values in components.items()},
    )


RUN = jax.jit(shaped)


def rewards(config, groups):
    found = RUN(jax.tree.map(jnp.float32, config), groups)
    assert found.reward.dtype == jnp.float32
    return found.reward


def test_nothing_configured_changes_nothing():
    groups = rows([1.0, 0.5], [3, 4])
    np.testing.assert_array_equal(rewards(Shaping(), groups), [1, 0.5])


def test_constraints_by_hand_and_a_missing_verdict_masks_the_row():
    groups = rows([0.9, 0.8, 0.7, 9.0], [1, 2, 3, 4], valid=[True, True, True, False],
                  polite=[1, 0, 1, 1], safe=[0.5, 1, NAN, 1])  # fmt: skip
    config = Shaping(constraints=Constraints(components=("polite", "safe"), infeasible_reward=-1.0))
    found = RUN(config, groups)
    np.testing.assert_allclose(found.reward, [0.9, -1, 0, 0])
    np.testing.assert_array_equal(found.valid, [True, True, False, False])
    one = Shaping(constraints=Constraints(components=("polite",), least=2.0))
    np.testing.assert_array_equal(rewards(one, groups), [0, 0, 0, 0])


def test_exploration_by_hand():
    groups = rows([1.0, 0.0], [4, 8], search=[0.25, 7.0])
    # 0.8 * 1 + 0.2 * 4 / 8 = 0.9; 0 + 0.2 * 8 / 8
    np.testing.assert_allclose(rewards(Shaping(exploration=ExplorationMix()), groups), [0.9, 0.2], rtol=1e-6)
    config = Shaping(exploration=ExplorationMix(share=0.5, component="search"))
    np.testing.assert_allclose(rewards(config, groups), [0.625, 0.5], rtol=1e-6)


def test_group_length_by_hand():
    groups = rows([1.0, 0.0, 1.0, 1.0], [1, 2, 5, 3], [STOP, STOP, TEXT, CUT])
    # lam = 0.5 - (len - 1) / 4: 0.5, 0.25, -0.5, 0; the second is wrong, the fourth was cut: min(0, lam)
    config = Shaping(group_length=GroupLength(weight=2.0))
    np.testing.assert_allclose(rewards(config, groups), [1 + 1, 0, 1 - 1, 1], rtol=1e-6)
    # Among the correct ones, lengths 1 and 5
    config = Shaping(group_length=GroupLength(weight=2.0, among="correct"))
    np.testing.assert_allclose(rewards(config, groups), [2, 0, 0, 1], rtol=1e-6)


def test_what_is_empty_or_not_judged_sets_no_bounds_of_length():
    groups = rows([1.0, 1.0, 1.0, 1.0], [0, 2, 4, 8], valid=[True, True, True, False])
    found = rewards(Shaping(group_length=GroupLength(weight=1.0)), groups)
    np.testing.assert_allclose(found, [1, 1.5, 0.5, 0], rtol=1e-6)


def test_a_length_penalty_by_hand():
    config = Shaping(length_penalty=LengthPenalty(target=4.0, weight=0.5))
    np.testing.assert_allclose(rewards(config, rows([1.0, 1.0], [4, 6])), [1, 0.75])  # 0.5 * (6 - 4) / 4


@pytest.mark.parametrize(
    ("how", "value", "cut"), [("replace", -1.0, -1.0), ("subtract", 0.25, 0.45), ("scale", 0.5, 0.35)]
)
def test_a_missing_stop_by_hand(how, value, cut):
    groups = rows([2.0, 0.7, 1.0, 0.7, 0.7], [1, 8, 3, 2, 2], [STOP, CUT, TEXT, Finish.FAILED, Finish.TOOL_BUDGET])
    found = rewards(Shaping(missing_stop=MissingStop(how=how, value=value)), groups)
    np.testing.assert_allclose(found, [2, cut, 1, cut, cut], rtol=1e-6)


def test_rewards_of_tokens_as_potentials_by_hand():
    # Rewards 0.4, 0.5 and 0.3 after a prompt's token: potentials 0, 0.4 and 0.9 of the states before, 0 at the end.
    # Differences 0.4, 0.5, -0.9, and with a discount of 0.5: 0.2, 0.45 - 0.4, -0.9. The second row has one token.
    groups = rows([1.0, 0.0], [3, 1])
    acts = jnp.array([[False, True, True, True], [False, True, False, False]])
    given = jnp.array([[7.0, 0.4, 0.5, 0.3], [jnp.nan, 0.6, jnp.nan, 7.0]])
    groups = groups.replace(action_mask=acts, token_reward=given)
    found = RUN(Shaping(potential=Potential()), groups)
    np.testing.assert_allclose(found.token_reward, [[0, 0.4, 0.5, -0.9], [0, 0, 0, 0]], atol=1e-6)
    np.testing.assert_array_equal(found.reward, groups.reward)
    # No completion earns more or less by them than another.
    np.testing.assert_allclose(found.token_reward.sum(-1), 0, atol=1e-6)
    halved = RUN(Shaping(potential=Potential(discount=0.5)), groups)
    np.testing.assert_allclose(halved.token_reward[0], [0, 0.2, 0.05, -0.9], atol=1e-6)
    with pytest.raises(ValueError, match=r"Potential\.discount = 0\.0 must lie in \(0, 1\]"):
        check_shaping(Shaping(potential=Potential(discount=0.0)))


def test_a_missing_stop_has_the_last_word():
    everything = Shaping(
        constraints=Constraints(components=("safe",)),
        exploration=ExplorationMix(share=0.5),
        group_length=GroupLength(weight=1.0),
        length_penalty=LengthPenalty(target=4.0),
        missing_stop=MissingStop(),
    )
    groups = rows([1.0, 1.0, 1.0], [2, 8, 6], [STOP, CUT, STOP], safe=[1, 1, 0])
    # 0.5 * 1 + 0.5 * 2 / 8 = 0.625, + 0.5; replaced; 0 + 0.5 * 6 / 8 = 0.375, + 0.5 - 4 / 6, - 2 / 4
    np.testing.assert_allclose(rewards(everything, groups), [1.125, -1, 0.375 + 0.5 - 4 / 6 - 0.5], rtol=1e-5)
    np.testing.assert_array_equal(RUN(everything, groups).outcome, groups.outcome)


def test_components_that_are_read():
    assert components_read(None) == components_read(Shaping(exploration=ExplorationMix())) == ()
    config = Shaping(constraints=Constraints(components=("a", "b")), exploration=ExplorationMix(component="c"))
    assert components_read(config) == ("a", "b", "c")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Shaping(constraints=Constraints(components=())), r"Constraints\.components is empty"),
        (Shaping(exploration=ExplorationMix(share=1.5)), r"ExplorationMix\.share = 1\.5 must lie in \[0, 1\]"),
        (Shaping(group_length=GroupLength(weight=0.0)), r"GroupLength\.weight = 0\.0 must be above 0"),
        (Shaping(group_length=GroupLength(weight=1e39)), r"GroupLength\.weight = 1e\+39 is no number within"),
        (
            Shaping(missing_stop=MissingStop(how="replace", value=-1e20)),
            r"value = -1e\+20 is no number within",
        ),
        (Shaping(length_penalty=LengthPenalty(target=0.0)), r"LengthPenalty\.target = 0\.0 must be at least 1 token"),
        (Shaping(length_penalty=LengthPenalty(target=1e-30)), r"LengthPenalty\.target = 1e-30 must be at least 1"),
        (
            Shaping(length_penalty=LengthPenalty(target=1.0, weight=1e15)),
            r"LengthPenalty\.weight = 1000000000000000\.0 is no number",
        ),
        (Shaping(length_penalty=LengthPenalty(target=1.0, weight=-1.0)), r"and weight = -1\.0 above 0"),
        (Shaping(missing_stop=MissingStop(how="subtract")), r"MissingStop\.value = -1\.0 is subtracted, which would"),
        (Shaping(missing_stop=MissingStop(how="scale")), r"MissingStop\.value = -1\.0 is the factor of the reward"),
        (Shaping(missing_stop=MissingStop(value=NAN)), r"MissingStop\.value = nan is no number"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        check_shaping(config)


def test_the_defaults_pass():
    check_shaping(Shaping())
    check_shaping(Shaping(group_length=GroupLength(), length_penalty=LengthPenalty(target=8.0),
                          missing_stop=MissingStop(), exploration=ExplorationMix(),
                          constraints=Constraints(components=("a",))))  # fmt: skip


def test_lengths_are_not_rewarded_by_a_verdict_that_is_held_out():
    bindings = ["Addition.verifiers=()", "Scoring.verifiers=[@Exact(), @Regex()]", "Regex.pattern='[0-9]+'",
                "Online.shaping=@Shaping()", "Shaping.group_length=@GroupLength()"]  # fmt: skip
    load_config("configs/algos/grpo.gin", bindings)
    with pytest.raises(ConfigError, match="the policy would learn from a held-out verdict"):
        load_config("configs/algos/grpo.gin", [*bindings, "Exact.weight=0.0"])
