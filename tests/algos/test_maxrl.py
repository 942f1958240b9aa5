from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import credited, two_prompts

from jrl.algos import ALGOS
from jrl.algos.maxrl import MaxRL
from jrl.config.errors import ConfigError
from jrl.resolve import load_config

OBJECTIVE = ALGOS["MaxRL"]


def test_rewards_are_relative_to_the_mean_of_their_group():
    # Group 0 has mean 1/3: (1 - 1/3) / (1/3) = 2, -1, -1. Group 1 has mean 1/2: +-1.
    np.testing.assert_allclose(credited(OBJECTIVE, MaxRL(), two_prompts()), [2, 1, -1, -1, -1, 0, 0], rtol=1e-5)


def test_a_mean_near_0_makes_advantages_of_any_size():
    # Rewards 1, -0.49, -0.49 of the first prompt have mean 0.02 / 3: (1 - 0.02 / 3) / (0.02 / 3) = 149, and -74.5.
    batch = two_prompts()
    found = credited(
        OBJECTIVE, MaxRL(), batch.replace(reward=jnp.where(batch.group == 0, batch.reward * 1.49 - 0.49, 0))
    )
    np.testing.assert_allclose(sorted(found)[-1], 149, rtol=1e-3)


SHAPED = ("Online.shaping=@Shaping()", "Shaping.missing_stop=@MissingStop()")
REGEX = ("Addition.verifiers=()", "Scoring.verifiers=[@Exact(), @Regex()]", "Regex.pattern='[0-9]+'")


@pytest.mark.parametrize(
    "bindings, what",
    [
        (SHAPED, r"Shaping\.missing_stop"),
        ((*SHAPED, "MissingStop.how='subtract'", "MissingStop.value=1.0"), r"Shaping\.missing_stop"),
        ((SHAPED[0], "Shaping.length_penalty=@LengthPenalty()", "LengthPenalty.target=2.0"),
         r"Shaping\.length_penalty"),
        ((SHAPED[0], "Shaping.group_length=@GroupLength()"), r"Shaping\.group_length"),
        (
            (*REGEX, SHAPED[0], "Shaping.constraints=@Constraints()", "Constraints.components=('Regex',)",
             "Constraints.infeasible_reward=-1.0"),
            r"Shaping\.constraints",
        ),
        (("Addition.verifiers=()", "Scoring.verifiers=[@Exact(), @Repetition()]"), "Repetition"),
        (("Addition.verifiers=()", "Scoring.verifiers=[@Exact(), @Similarity()]"), "Similarity"),
        ((*REGEX, "Regex.weight=-0.1"), "Regex"),
    ],
)  # fmt: skip
def test_what_can_make_rewards_negative_is_refused(bindings, what):
    load_config("configs/algos/opo.gin", bindings)
    with pytest.raises(ConfigError, match=rf"advantages of any size; {what} can make a reward negative"):
        load_config("configs/algos/maxrl.gin", bindings)


@pytest.mark.parametrize(
    "bindings",
    [
        (*SHAPED, "MissingStop.value=0.0"),
        (*SHAPED, "MissingStop.how='scale'", "MissingStop.value=0.5", "Shaping.exploration=@ExplorationMix()"),
        (*REGEX, SHAPED[0], "Shaping.constraints=@Constraints()", "Constraints.components=('Regex',)"),
        ("Addition.verifiers=()", "Scoring.verifiers=[@Exact(), @Repetition()]", "Repetition.weight=-0.1"),
        ("Addition.verifiers=()", "Scoring.verifiers=[@Exact(), @Similarity()]", "Similarity.unparsable=0.0"),
    ],
)
def test_what_leaves_rewards_at_0_or_above_is_not_refused(bindings):
    load_config("configs/algos/maxrl.gin", bindings)


def test_tokens_weigh_alike():
    mask = jnp.array([[True, False, False], [True, True, True], [False] * 3])
    np.testing.assert_array_equal(OBJECTIVE.weights(MaxRL(), mask, 3), mask)
    assert OBJECTIVE.denominator(MaxRL(), mask, 3, 3) == 4
